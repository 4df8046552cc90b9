# SPDX-License-Identifier: Apache-2.0
"""What can be known of the real binding without a GPU, and that the stand-in does not claim more."""

from __future__ import annotations

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
from commrt.transport.nccl_communicator import load
from commrt.transport.protocol import CPU

pytestmark = pytest.mark.filterwarnings("ignore")  # CuPy warns where there is no GPU
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so one can be made")


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return load()


def test_it_runs_on_an_nccl_no_older_than_it_was_built_with(real):
    assert real.get_version() >= real.get_build_version() >= 21800


def test_an_id_is_128_bytes_and_never_the_same(real):
    assert {len(real.get_unique_id()), len(real.get_unique_id())} == {128}
    assert real.get_unique_id() != real.get_unique_id()


def test_groups_nest_and_an_end_without_a_start_is_refused(real):
    for _ in range(2):
        real.groupStart()
    for _ in range(2):
        real.groupEnd()
    with pytest.raises(real.NcclError, match="INVALID_USAGE"):
        real.groupEnd()


def test_ids_of_another_kind_are_refused_as_the_stand_in_does(real):
    for binding, (number, error) in product((real, stand_in), ((tuple(range(128)), TypeError), (b"short", ValueError))):
        with pytest.raises(error):
            binding.NcclCommunicator(2, number, 0)


def test_it_has_no_word_for_statuses_above_six(real):
    for binding, status in product((real, stand_in), (7, 8)):
        assert str(binding.NcclError(6)).startswith("NCCL_ERROR_REMOTE_ERROR")
        with pytest.raises(KeyError):
            binding.NcclError(status)


@without_a_gpu
def test_a_communicator_that_could_not_be_made_leaves_a_group_open_in_its_thread(real):
    with pytest.raises(real.NcclError):
        real.NcclCommunicator(1, real.get_unique_id(), 0)
    real.groupEnd()
    with pytest.raises(real.NcclError, match="INVALID_USAGE"):
        real.groupEnd()


@without_a_gpu
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
    for names, here, there in (
        (FUNCTIONS, stand_in, real),
        (METHODS, stand_in.NcclCommunicator, real.NcclCommunicator),
    ):
        taken = {name: declared(getattr(here, name)) for name in names}
        assert taken == {name: documented(getattr(there, name)) for name in names}


def test_where_cupy_is_absent_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UsageError, match="GPUs exchange through CuPy, which cannot be imported"):
        load()


@pytest.mark.parametrize("name", ["nccl", "nccl_communicator", "neighbours", "peers"])
def test_transports_for_gpus_can_be_imported_where_cupy_is_absent(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    run_module(f"commrt.transport.{name}")
