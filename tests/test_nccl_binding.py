# SPDX-License-Identifier: Apache-2.0
"""What can be known of the real binding without a GPU, and that the stand-in does not claim more."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def pair(pool):
    """Two ranks' communicators of the stand-in."""
    return [*pool.map(partial(stand_in.NcclCommunicator, 2, stand_in.get_unique_id()), range(2))]


def swap(communicator, mine, theirs):
    peer = 1 - communicator._rank
    stand_in.groupStart()
    communicator.send(mine.data_ptr(), mine.nbytes, stand_in.NCCL_INT8, peer, 0)
    communicator.recv(theirs.data_ptr(), theirs.nbytes, stand_in.NCCL_INT8, peer, 0)
    stand_in.groupEnd()


def test_what_the_stand_in_records_happens_in_each_replay_and_meets_what_was_recorded_with_it(pair, pool):
    data = [(torch.full((3,), float(rank)), torch.zeros(3)) for rank in range(2)]
    exchanges = [partial(swap, each, *own) for each, own in zip(pair, data, strict=True)]
    (ours, _), (theirs, later) = [[stand_in.record(exchange) for _ in range(2)] for exchange in exchanges]
    assert data[1][1].tolist() == [0.0] * 3
    for value in (4.0, 7.0):
        data[0][0].fill_(value)
        list(pool.map(lambda graph: graph.replay(), (ours, theirs)))
        assert data[1][1].tolist() == [value] * 3
    for other in (later.replay, exchanges[1]):
        for future in [pool.submit(ours.replay), pool.submit(other)]:
            assert str(future.exception(20)) == "NCCL_ERROR_INTERNAL_ERROR"


def test_a_communicator_of_the_stand_in_is_freed_when_its_graphs_are(pair, pool):
    graph = stand_in.record(partial(swap, pair[0], torch.zeros(3), torch.zeros(3)))
    freed = pool.submit(pair[0].abort)
    with pytest.raises(TimeoutError):
        freed.result(0.2)
    graph.reset()
    freed.result(20)


def test_where_cupy_is_absent_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(UsageError, match="GPUs exchange through CuPy, which cannot be imported"):
        load()


@pytest.mark.parametrize("name", ["nccl", "nccl_communicator", "neighbours", "peers"])
def test_transports_for_gpus_can_be_imported_where_cupy_is_absent(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    run_module(f"commrt.transport.{name}")
