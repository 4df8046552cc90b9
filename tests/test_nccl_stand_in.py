# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the NCCL binding keeps NCCL's rules, also those that hurt; `test_nccl_mutants` breaks each.

What goes well is shown by the transport over it, which conforms (`test_transport`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from functools import partial

import nccl_stand_in as nccl
import pytest
import torch
from nccl_stand_in import record

PATIENT_S, SHORT_S = 20.0, 0.2
INTERNAL_ERROR, REMOTE_ERROR = "NCCL_ERROR_INTERNAL_ERROR", "NCCL_ERROR_REMOTE_ERROR"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def pair(pool):
    """Two ranks' communicators."""
    made = [*pool.map(partial(nccl.NcclCommunicator, 2, nccl.get_unique_id()), range(2))]
    yield made
    for communicator in made:
        communicator.abort()


@pytest.fixture
def alone():
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    yield communicator
    communicator.abort()


def send(communicator, tensor, peer=1):
    communicator.send(tensor.data_ptr(), tensor.numel(), nccl.NCCL_FLOAT32, peer, 0)


def recv(communicator, tensor, peer=0):
    communicator.recv(tensor.data_ptr(), tensor.numel(), nccl.NCCL_FLOAT32, peer, 0)


def swapped(communicator, mine, theirs):
    peer = 1 - communicator.rank_id()
    nccl.groupStart()
    send(communicator, mine, peer)
    recv(communicator, theirs, peer)
    nccl.groupEnd()


def errors(pool, *calls):
    """What calls of several threads at once raise."""
    return [str(future.exception(PATIENT_S)) for future in [pool.submit(call) for call in calls]]


def test_sends_first_on_both_sides_wait_until_each_side_aborts(pair, pool):
    data = torch.zeros(2)
    waiting = [pool.submit(send, each, data, 1 - each.rank_id()) for each in pair]
    for communicator, future in zip(pair, waiting, strict=True):
        with pytest.raises(StillRunning):
            future.result(SHORT_S)
        communicator.abort()
        assert str(future.exception(PATIENT_S)) == REMOTE_ERROR


@pytest.mark.parametrize(("sent", "received"), [([2], [1]), ([1], [2]), ([1, 1], [2]), ([1, 1], [1])], ids=str)
def test_a_group_of_other_counts_than_the_one_that_it_meets_is_an_error_at_both_ends(pair, pool, sent, received):
    data, landing = torch.zeros(2), torch.zeros(2)

    def posted(call, communicator, tensor, numels):
        nccl.groupStart()
        for numel in numels:
            call(communicator, tensor[:numel])
        nccl.groupEnd()

    calls = partial(posted, send, pair[0], data, sent), partial(posted, recv, pair[1], landing, received)
    assert errors(pool, *calls) == [INTERNAL_ERROR] * 2


def test_a_send_to_oneself_needs_its_receive_in_the_same_group(alone):
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        send(alone, torch.ones(1), 0)


def test_a_group_that_is_left_open_gathers_what_comes_later(alone):
    source, target = torch.full((1,), 3.0), torch.zeros(1)
    for _ in range(2):
        nccl.groupStart()
    send(alone, source, 0)
    recv(alone, target)
    for seen in (0.0, 3.0):
        nccl.groupEnd()
        assert target.item() == seen
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()


def test_a_second_thread_is_refused_and_nothing_reaches_the_memory_of_a_rank_that_aborted(pair, pool):
    data, target = torch.ones(1), torch.zeros(1)
    waiting = pool.submit(recv, pair[0], target, 1)
    while not pair[0]._users:
        pass
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        send(pair[0], data)
    pair[0].abort()
    assert str(waiting.exception(PATIENT_S)) == REMOTE_ERROR
    late = pool.submit(send, pair[1], data, 0)
    with pytest.raises(StillRunning):
        late.result(SHORT_S)
    assert target.item() == 0.0
    pair[1].abort()


@pytest.mark.parametrize("numel_type_peer", [(0, 7, 1), (0, 99, 0), (-1, 7, 0)])
def test_a_transfer_that_cannot_be_is_an_invalid_argument(alone, numel_type_peer):
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        alone.send(torch.zeros(9).data_ptr(), *numel_type_peer, 0)


def test_an_address_must_be_an_integer(alone):
    with pytest.raises(TypeError, match="an integer is required"):
        alone.send(torch.zeros(1), 1, nccl.NCCL_FLOAT32, 0, 0)


def test_a_communicator_that_was_aborted_takes_nothing_more(alone):
    alone.check_async_error()
    alone.abort()
    for call in (partial(send, alone, torch.zeros(1), 0), alone.check_async_error):
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            call()


def test_a_communicator_that_could_not_be_made_leaves_a_group_open_in_its_thread():
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        nccl.NcclCommunicator(2, bytes(128), 2)
    nccl.groupEnd()
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()


def test_after_a_refused_call_nothing_of_its_group_is_posted(pair, pool):
    data, target = torch.full((2,), 3.0), torch.zeros(2)
    nccl.groupStart()
    send(pair[0], torch.ones(2))
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        recv(pair[0], target, 7)
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        nccl.groupEnd()
    assert errors(pool, *(partial(swapped, each, data, target) for each in pair)) == ["None"] * 2
    assert target.tolist() == [3.0, 3.0]


@pytest.fixture
def recorded(pair):
    """(data, exchanges, graphs): what each rank sends and receives, and two graphs of that exchange."""
    data = [(torch.full((3,), float(rank)), torch.zeros(3)) for rank in range(2)]
    exchanges = [partial(swapped, each, *own) for each, own in zip(pair, data, strict=True)]
    graphs = [[record(exchange) for _ in range(2)] for exchange in exchanges]
    yield data, exchanges, graphs
    for graph in (*graphs[0], *graphs[1]):
        graph.reset()


def test_what_is_recorded_happens_in_each_replay_and_must_meet_what_was_recorded_with_it(recorded, pool):
    data, exchanges, (ours, theirs) = recorded
    assert data[1][1].tolist() == [0.0] * 3
    for value in (4.0, 7.0):
        data[0][0].fill_(value)
        assert errors(pool, ours[0].replay, theirs[0].replay) == ["None"] * 2
        assert data[1][1].tolist() == [value] * 3
    for other in (theirs[1].replay, exchanges[1]):
        assert errors(pool, ours[0].replay, other) == [INTERNAL_ERROR] * 2


def test_a_communicator_waits_for_its_graphs_when_it_is_freed(pair, pool):
    graph = record(partial(swapped, pair[0], torch.zeros(3), torch.zeros(3)))
    freed = pool.submit(pair[0].abort)
    with pytest.raises(StillRunning):
        freed.result(SHORT_S)
    graph.reset()
    freed.result(PATIENT_S)
