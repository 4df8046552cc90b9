# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the NCCL binding keeps NCCL's rules, also those that hurt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import nccl_stand_in as nccl
import pytest
import torch
from nccl_stand_in import record

PATIENT_S, SHORT_S = 20.0, 0.2


@pytest.fixture
def ranks():
    """Make communicators with a new unique id, and run a function of each on a thread of its own."""
    made = []

    def start(count):
        number = nccl.get_unique_id()
        with ThreadPoolExecutor(count) as pool:
            made.extend(pool.map(lambda rank: nccl.NcclCommunicator(count, number, rank), range(count)))
        return made[-count:]

    yield start
    for communicator in made:
        communicator.abort()


def on_all(communicators, body):
    with ThreadPoolExecutor(len(communicators)) as pool:
        return [future.exception(PATIENT_S) for future in [pool.submit(body, c) for c in communicators]]


KEPT = []
"""Tensors whose addresses were given away."""


def send(communicator, tensor, peer, count=None):
    KEPT.append(tensor)
    communicator.send(tensor.data_ptr(), tensor.numel() if count is None else count, nccl.NCCL_FLOAT32, peer, 0)


def recv(communicator, tensor, peer, count=None):
    KEPT.append(tensor)
    communicator.recv(tensor.data_ptr(), tensor.numel() if count is None else count, nccl.NCCL_FLOAT32, peer, 0)


def swapped(communicator, mine, theirs):
    nccl.groupStart()
    send(communicator, mine, 1 - communicator.rank_id())
    recv(communicator, theirs, 1 - communicator.rank_id())
    nccl.groupEnd()


def test_a_pair_swaps_in_one_group(ranks):
    mine, theirs = [torch.tensor([0.0, 10.0]), torch.tensor([1.0, 11.0])], [torch.zeros(2), torch.zeros(2)]
    assert on_all(ranks(2), lambda c: swapped(c, mine[c.rank_id()], theirs[c.rank_id()])) == [None, None]
    assert torch.equal(theirs[0], mine[1])
    assert torch.equal(theirs[1], mine[0])


def test_sends_first_on_both_sides_wait_until_each_side_aborts(ranks):
    pair = ranks(2)
    threads = [threading.Thread(target=ends_in_an_error, args=(send, c, torch.zeros(2), 1 - c.rank_id())) for c in pair]
    for thread in threads:
        thread.start()
    threads[0].join(SHORT_S)
    assert all(thread.is_alive() for thread in threads)
    pair[0].abort()
    threads[0].join(PATIENT_S)
    threads[1].join(SHORT_S)
    assert [thread.is_alive() for thread in threads] == [False, True]
    pair[1].abort()
    threads[1].join(PATIENT_S)
    assert not threads[1].is_alive()


def ends_in_an_error(call, *arguments):
    with pytest.raises(nccl.NcclError, match="NCCL_ERROR_REMOTE_ERROR"):
        call(*arguments)


def test_transfers_of_a_pair_meet_in_their_order(ranks):
    landing = [torch.zeros(1) for _ in range(4)]

    def body(c):
        for i in range(4):
            send(c, torch.tensor([float(i)]), 1) if c.rank_id() == 0 else recv(c, landing[i], 0)

    assert on_all(ranks(2), body) == [None, None]
    assert torch.cat(landing).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_counts_that_differ_are_an_error_at_both_ends(ranks):
    for sent, received in ((2, 1), (1, 2)):

        def body(c, sent=sent, received=received):
            send(c, torch.zeros(4), 1, sent) if c.rank_id() == 0 else recv(c, torch.zeros(4), 0, received)

        assert [str(error) for error in on_all(ranks(2), body)] == ["NCCL_ERROR_INTERNAL_ERROR"] * 2


def test_a_group_must_meet_a_group_of_as_many(ranks):
    landing = torch.zeros(2)

    def body(c):
        if c.rank_id() == 1:
            recv(c, landing[:1], 0)
            return
        nccl.groupStart()
        send(c, torch.ones(1), 1)
        send(c, torch.ones(1), 1)
        nccl.groupEnd()

    assert [str(error) for error in on_all(ranks(2), body)] == ["NCCL_ERROR_INTERNAL_ERROR"] * 2


def test_different_peers_progress_in_any_order(ranks):
    landing = torch.zeros(3, 3)

    def body(c):
        others = [(c.rank_id() + k) % 3 for k in (1, 2)]
        nccl.groupStart()
        for peer in others:
            send(c, torch.full((1,), float(c.rank_id())), peer)
        for peer in reversed(others):
            recv(c, landing[c.rank_id(), peer : peer + 1], peer)
        nccl.groupEnd()

    assert on_all(ranks(3), body) == [None] * 3
    assert landing.tolist() == [[0.0, 1.0, 2.0], [0.0, 0.0, 2.0], [0.0, 1.0, 0.0]]


def test_a_send_to_oneself_needs_its_receive_in_the_same_group(ranks):
    (alone,) = ranks(1)
    source, target = torch.tensor([3.0]), torch.zeros(1)
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        send(alone, source, 0)
    nccl.groupStart()
    send(alone, source, 0)
    recv(alone, target, 0)
    nccl.groupEnd()
    assert target.item() == 3.0


def test_a_group_that_an_exception_left_open_gathers_what_comes_later(ranks):
    (alone,) = ranks(1)
    target = torch.zeros(1)
    nccl.groupStart()
    nccl.groupStart()
    send(alone, torch.tensor([3.0]), 0)
    recv(alone, target, 0)
    nccl.groupEnd()
    assert target.item() == 0.0
    nccl.groupEnd()
    assert target.item() == 3.0
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()


def test_two_threads_must_not_use_one_communicator_at_a_time(ranks):
    pair = ranks(2)
    waiting = threading.Thread(target=ends_in_an_error, args=(recv, pair[0], torch.zeros(1), 1))
    waiting.start()
    while not pair[0]._users:
        pass
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        send(pair[0], torch.zeros(1), 1)
    pair[0].abort()
    waiting.join(PATIENT_S)


def test_nothing_reaches_the_memory_of_a_rank_that_aborted(ranks):
    pair, target = ranks(2), torch.zeros(1)
    waiting = threading.Thread(target=ends_in_an_error, args=(recv, pair[0], target, 1))
    waiting.start()
    while not pair[0]._users:
        pass
    pair[0].abort()
    waiting.join(PATIENT_S)
    late = threading.Thread(target=ends_in_an_error, args=(send, pair[1], torch.ones(1), 0))
    late.start()
    late.join(SHORT_S)
    assert late.is_alive()
    assert target.item() == 0.0
    pair[1].abort()
    late.join(PATIENT_S)


def test_a_transfer_that_cannot_be_is_an_invalid_argument(ranks):
    (alone,) = ranks(1)
    peer, dtype, count = (1, 0, 7), (0, 99, 7), (0, 0, -1)
    for to, kind, numel in (peer, dtype, count):
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            alone.send(torch.zeros(9).data_ptr(), numel, kind, to, 0)


def test_an_address_must_be_an_integer(ranks):
    (alone,) = ranks(1)
    with pytest.raises(TypeError, match="an integer is required"):
        alone.send(torch.zeros(1), 1, nccl.NCCL_FLOAT32, 0, 0)


def test_a_communicator_that_was_aborted_takes_nothing_more(ranks):
    (alone,) = ranks(1)
    assert alone.rank_id() == 0
    alone.check_async_error()
    alone.abort()
    for call in (lambda: send(alone, torch.zeros(1), 0), alone.check_async_error):
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            call()


def test_a_communicator_that_could_not_be_made_leaves_a_group_open_in_its_thread():
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        nccl.NcclCommunicator(2, bytes(128), 2)
    nccl.groupEnd()
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()


def test_after_a_refused_call_nothing_of_its_group_is_posted(ranks):
    pair, target = ranks(2), torch.zeros(2)
    nccl.groupStart()
    send(pair[0], torch.ones(2), 1)
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        recv(pair[0], target, 7)
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        nccl.groupEnd()
    swapped_on_both = on_all(pair, lambda c: swapped(c, torch.full((2,), 3.0), target))
    assert swapped_on_both == [None, None]
    assert target.tolist() == [3.0, 3.0]


@pytest.fixture
def recorded(ranks):
    """Two ranks, what each sends and receives, and two graphs of that exchange for each."""
    pair = ranks(2)
    data = [(torch.full((3,), float(rank)), torch.zeros(3)) for rank in range(2)]
    graphs = [[record(partial(swapped, rank, *own)) for _ in range(2)] for rank, own in zip(pair, data, strict=True)]
    yield pair, data, graphs
    for graph in (*graphs[0], *graphs[1]):
        graph.reset()


def test_what_is_recorded_happens_in_each_replay(recorded):
    _, data, graphs = recorded
    assert data[1][1].tolist() == [0.0] * 3
    for value in (4.0, 7.0):
        data[0][0].fill_(value)
        assert on_all([first for first, _ in graphs], lambda graph: graph.replay()) == [None, None]
        assert data[1][1].tolist() == [value] * 3


def test_a_replay_must_meet_the_replay_of_what_was_recorded_with_it(recorded):
    pair, data, graphs = recorded
    for other in (graphs[1][1].replay, partial(swapped, pair[1], *data[1])):
        errors = on_all([graphs[0][0].replay, other], lambda call: call())
        assert [str(error) for error in errors] == ["NCCL_ERROR_INTERNAL_ERROR"] * 2


def test_a_communicator_waits_for_its_graphs_when_it_is_freed(ranks):
    communicator = ranks(2)[0]
    graph = record(partial(swapped, communicator, torch.zeros(3), torch.zeros(3)))
    freed = threading.Thread(target=communicator.abort)
    freed.start()
    assert freed.is_alive()
    graph.reset()
    freed.join(20)
    assert not freed.is_alive()
