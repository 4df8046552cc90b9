# SPDX-License-Identifier: Apache-2.0
"""Exchanges through memory that the ranks of a host read, over stand-ins for it and for NCCL, with threads as ranks."""

import os
from contextlib import contextmanager
from math import inf
from unittest.mock import Mock, patch

import nccl_stand_in as nccl
import pytest
import torch
from cases import on_ranks
from moved_clock import moved_clock
from peer_group import NOW, ODD, connected, over_peers, values_of, wait_until
from torch import nn
from transports import over_nccl

import commrt
from commrt.algorithms import direct, ring
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.errors import DeadlineExceeded, PeerLost, TransportClosed, TransportError
from commrt.kernels.signal_wait import ABORT
from commrt.runtime import reading
from commrt.testing.ranks import run_ranks
from commrt.threads.streams import Streams
from commrt.transport import nccl as nccl_module
from commrt.transport import signals
from commrt.transport.protocol import P2PGroup, Tag


def by_messages(schedule, values):
    """What the executor makes of `values`, by messages between threads."""

    def body(world):
        row = values[world.rank].clone()
        world.run(schedule, row)
        return row

    return torch.stack(run_ranks(len(values), body))


@pytest.mark.parametrize(
    ("hosts", "dtype", "numel"),
    [
        ("aa", torch.bfloat16, 37),
        ("aaa", torch.float32, ODD),
        ("aaaa", torch.int32, 1),
        ("aaaaaaaa", torch.bfloat16, 37),
        ("aab", torch.float32, ODD),
        ("aabbc", torch.float32, ODD),
    ],
)
def test_every_all_reduce_has_the_bits_of_messages(hosts, dtype, numel):
    size = len(hosts)
    with connected(hosts) as group:
        buffers, values = group.buffers(numel, dtype), values_of(size, numel, dtype)
        for name, make in ALGORITHMS.items():
            schedule = make().schedule(0, size)
            assert torch.equal(group.run(schedule, buffers, values), by_messages(schedule, values)), name


def test_a_program_of_some_ranks_leaves_the_others_alone():
    members, values = (0, 2, 3), values_of(4, ODD, torch.float32)
    with connected("aaaa") as group:
        buffers = group.buffers(ODD)

        def run(rank):
            buffers[rank][0].copy_(values[rank])
            if rank in members:
                group.bound(direct.all_reduce(3), buffers, rank, members).run(NOW)
            after = buffers[rank][0].clone()
            group.bound(ring.all_reduce(4), buffers, rank).run(NOW)
            return after, buffers[rank][0].clone()

        some, everybody = (torch.stack(each) for each in zip(*group.on_all(run), strict=True))
    want = values.clone()
    want[list(members)] = by_messages(direct.all_reduce(3), values[list(members)])
    assert torch.equal(some, want)
    assert torch.equal(everybody, by_messages(ring.all_reduce(4), want))


class Capturing(Streams):
    def __init__(self, capture):
        self.capture = capture


@pytest.fixture
def graphs_of_kernels(monkeypatch):
    """Combining is recorded by a graph, as on a GPU."""

    def noted(combinations):
        return lambda *args: tuple((lambda kernel=each: nccl.ask(kernel)) for each in combinations(*args))

    monkeypatch.setattr(reading, "combinations_of", noted(reading.combinations_of))
    copying = reading.copying
    monkeypatch.setattr(reading, "copying", lambda *args: noted(lambda *args: [copying(*args)])(*args)[0])
    monkeypatch.setattr(nccl_module, "streams_of", lambda device: Capturing(nccl.record))


REPLAYS = 200


def test_many_replays_with_calls_between_give_the_sums_of_what_they_find(graphs_of_kernels):
    with connected("aa") as group:
        buffers = group.buffers(37, torch.int32)

        def run(rank):
            buffer, wrong = buffers[rank][0], 0
            bound = group.bound(direct.all_reduce(2), buffers, rank)
            replay = group.transports[rank].capture(lambda: bound.run(NOW), bound.group)
            for number in range(REPLAYS):
                buffer.copy_((torch.arange(37) + number) * (rank + 1))
                (bound.run if number % 10 == 3 else replay)(Tag(number, 0))
                wrong += int((buffer != (torch.arange(37) + number) * 3).sum())
            return wrong

        assert group.on_all(run) == [0, 0]


def test_a_replay_that_waits_in_vain_says_which_step_it_was(graphs_of_kernels):
    with connected("aa") as group, moved_clock() as clock:
        buffers, transport = group.buffers(ODD), group.transports[0]
        bound = group.bound(direct.all_reduce(2), buffers, 0)
        replay = transport.capture(lambda: bound.run(NOW), bound.group)
        future = group.pool.submit(replay, Tag(42, 5))
        clock.advance_until(future.done)
        with pytest.raises(DeadlineExceeded, match=r"rank 1 did not come .*step 42, bucket 5, hop 0"):
            transport.wait()


def test_a_local_peer_that_gives_up_is_seen_while_a_graph_waits_for_a_remote_rank_too(graphs_of_kernels):
    with connected("aab") as group:
        buffers, transport = group.buffers(ODD), group.transports[0]
        bound = group.bound(direct.all_reduce(3), buffers, 0)
        replay = transport.capture(lambda: bound.run(NOW), bound.group)
        assert bound.group.peers == {2}
        future = group.pool.submit(replay, NOW)
        wait_until(lambda: transport._watch._notices._next_read_s)  # what comes now is in no read but a later one
        group.transports[1].abort()
        error = future.exception(60)
    assert (type(error), error.place.peer) == (PeerLost, 1)


def test_a_graph_of_waits_is_replayed_only_while_it_is_not_freed(monkeypatch):
    graph = Mock()
    monkeypatch.setattr(nccl_module, "streams_of", lambda device: Capturing(lambda work: graph))
    with connected("aa") as group:
        transport = group.transports[0]
        graph.replay.side_effect = lambda: locked.append(transport._watch.communicator.in_use.locked())
        locked, replay = [], transport.capture(int, P2PGroup([], [], reads=True))
        replay(NOW)
        assert locked == [True]
        monkeypatch.setattr(transport, "_begin", lambda *_: transport.abort())  # as another thread does, right after it
        with pytest.raises(TransportClosed):
            replay(NOW)
    graph.replay.assert_called_once()


DIRECT = direct.all_reduce(3)


@contextmanager
def missing(hops):
    """(group, futures) of ranks 0 and 1, which wait for rank 2 after it has run so many hops."""
    watched_late = patch.object(signals, "READ_NOTICES_S", inf)  # or the watchdog may say first who has left
    with watched_late, connected("aaa") as group, moved_clock() as clock:
        buffers = group.buffers(ODD)
        bound = group.on_all(lambda rank: group.bound(DIRECT, buffers, rank))

        def run(rank):
            for hop in bound[rank].hops[: hops if rank == 2 else None]:
                hop.exchange(NOW)
                for combine in hop.combinations:
                    combine()
            group.transports[rank].wait()

        futures = [group.pool.submit(run, rank) for rank in range(3)]
        futures[2].result(60)
        clock.advance_until(lambda: all(future.done() for future in futures[:2]))
        yield group, futures[:2], bound


@pytest.mark.parametrize("hops", range(3), ids=["the first", "the second", "the last"])
def test_ranks_that_wait_for_another_on_the_device_raise_its_number_then_and_later(hops):
    with missing(hops) as (group, futures, bound):
        errors = [future.exception() for future in futures]
        for rank in (0, 1):
            with pytest.raises(DeadlineExceeded):
                bound[rank].run(NOW)
            group.transports[rank].close()
    assert {type(error) for error in errors} == {DeadlineExceeded}
    assert [(error.place.peer, error.place.hop, error.place.step) for error in errors] == [(2, hops, 7)] * 2
    assert "rank 2 did not come within 20 s" in str(errors[0])


def test_a_rank_that_comes_after_the_others_have_given_up_fails_too():
    with missing(2) as (group, _, bound):
        bound[2].hops[-1].exchange(NOW)
        with pytest.raises(DeadlineExceeded, match=r"rank 0 .* gave up"):
            group.transports[2].wait()


def test_abort_from_another_thread_ends_a_wait():
    with connected("aa") as group, moved_clock():  # no deadline passes
        buffers = group.buffers(ODD)
        bound, first = group.bound(direct.all_reduce(2), buffers, 0), group.transports[0]
        future = group.pool.submit(bound.run, NOW)
        wait_until(lambda: int(group.transports[1]._mapped.inbox(0)) == 1)
        first.abort()
        with pytest.raises(TransportClosed):
            future.result(10)
        first.close()
        with pytest.raises(TransportClosed):
            bound.run(NOW)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12: nothing that is forked computes
def test_a_forked_child_cannot_exchange_and_leaves_all_to_its_parent():
    with connected("aa") as group:
        buffers = group.buffers(ODD, torch.int32)
        bound = group.on_all(lambda rank: group.bound(direct.all_reduce(2), buffers, rank))
        if (pid := os.fork()) == 0:
            os._exit(in_child(group, bound[0]))
        assert os.waitpid(pid, 0)[1] == 0
        group.on_all(lambda rank: buffers[rank][0].fill_(rank + 1))
        group.on_all(lambda rank: bound[rank].run(NOW))
        assert [buffer.unique().tolist() for buffer, _ in buffers] == [[3], [3]]


def in_child(group, bound):
    """0 if a child of a fork can exchange nothing, and closes nothing of its parent's."""
    try:
        bound.run(NOW)
    except TransportClosed:
        group.transports[0].close()
        return 0 if group.memories[0].mapped == 2 else 2
    return 1


def test_what_was_given_up_between_hosts_is_not_read_within_one():
    """On a GPU the stream goes on after NCCL was aborted, with memory in which nothing has come."""
    numel, schedule = 64, ring.all_reduce(4)
    with connected("aabb") as group:
        buffers = group.buffers(numel)

        def run(rank):
            transport = group.transports[rank]
            transport.timeout_s = 2.0
            bound = group.bound(schedule, buffers, rank)
            if rank == 0:
                transport._signals._words[ABORT] = 1  # as before NCCL is aborted
            try:
                bound.run(NOW)
                transport.wait()
            except TransportError as error:
                return type(error)
            return None

        assert set(group.on_all(run)[:2]) <= {DeadlineExceeded, PeerLost}


@on_ranks(2, connect=over_peers)
def test_a_model_whose_only_buffers_are_empty_can_be_attached(world):
    model = nn.Linear(3, 2)
    model.register_buffer("nothing", torch.zeros(0))
    commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world).detach()


@pytest.mark.parametrize(("staleness", "connect"), [(0, over_nccl), (0, over_peers), (1, over_peers)])
def test_gossip_goes_on_without_a_rank_whatever_was_under_way(staleness, connect):
    def body(world):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = commrt.attach(model, optimizer, commrt.Gossip(staleness=staleness), world=world)
        for step in range(5):
            if step == 2 and world.rank == 2:
                world.abort(RuntimeError("given up on purpose"))
                return None
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        replica.drain()
        return len(world.members)

    assert run_ranks(3, body, connect=connect) == [2, 2, None]
