# SPDX-License-Identifier: Apache-2.0
"""What can be known of the real binding without a GPU, and that the stand-in does not claim more."""

import inspect
import sys
from itertools import product
from runpy import run_module

import nccl_stand_in as stand_in
import pytest
import torch
from torch.distributed import HashStore

from commrt.errors import TransportError, UsageError
from commrt.transport.nccl import NcclTransport
from commrt.transport.nccl_binding import load
from commrt.transport.protocol import CPU

pytestmark = pytest.mark.filterwarnings("ignore")  # CuPy warns where there is no GPU


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return load()


def test_an_id_is_128_bytes_and_never_the_same(real):
    assert {len(real.get_unique_id()), len(real.get_unique_id())} == {128}
    assert real.get_unique_id() != real.get_unique_id()


def test_it_has_no_word_for_statuses_above_six(real):
    for binding, status in product((real, stand_in), (7, 8)):
        assert str(binding.NcclError(6)).startswith("NCCL_ERROR_REMOTE_ERROR")
        with pytest.raises(KeyError):
            binding.NcclError(status)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so one can be made")
def test_without_a_gpu_a_transport_ends_in_a_sentence_and_leaves_no_group_open(real):
    with pytest.raises(TransportError, match="NCCL made no communicator"):
        NcclTransport(HashStore(), 0, range(1), 10.0, CPU, real)
    with pytest.raises(real.NcclError, match="INVALID_USAGE"):
        real.groupEnd()


def test_the_stand_in_offers_nothing_that_is_not_there(real):
    assert {name for name in stand_in.__all__ if not hasattr(real, name)} == set()
    members = {name for name in vars(stand_in.NcclCommunicator) if not name.startswith("_")}
    assert {name for name in members if not hasattr(real.NcclCommunicator, name)} == set()
    constants = [name for name in stand_in.__all__ if name.startswith("NCCL_")]
    assert {name: getattr(stand_in, name) for name in constants} == {name: getattr(real, name) for name in constants}


def documented(function):
    """How many arguments a compiled function takes at least, by the first line of its documentation."""
    first = function.__doc__.splitlines()[0]
    names = first[first.index("(") + 1 : first.rindex(")")].split(",")
    return len([name for name in names if name.strip() not in ("", "self") and "=" not in name])


def declared(function):
    return len([name for name in inspect.signature(function).parameters if name != "self"])


FUNCTIONS = ("get_build_version", "get_version", "get_unique_id", "groupStart", "groupEnd", "NcclCommunicator")
METHODS = ("send", "recv", "check_async_error", "abort", "destroy")


def test_each_call_takes_the_arguments_that_the_real_one_documents(real):
    for name in (*FUNCTIONS, *METHODS):
        here, there = (stand_in, real) if name in FUNCTIONS else (stand_in.NcclCommunicator, real.NcclCommunicator)
        assert (name, declared(getattr(here, name))) == (name, documented(getattr(there, name)))


def test_where_cupy_is_absent_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UsageError, match="GPUs exchange through CuPy, which cannot be imported"):
        load()


@pytest.mark.parametrize("name", ["nccl", "nccl_binding", "ipc", "peers"])
def test_transports_for_gpus_can_be_imported_where_cupy_is_absent(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    run_module(f"commrt.transport.{name}")
