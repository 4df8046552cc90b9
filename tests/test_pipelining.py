# SPDX-License-Identifier: Apache-2.0
"""What arrived in one hop may be combined beside the next exchange: never while either touches the other's memory.

The oracle knows nothing of chunks: it notes which bytes each exchange and each combination reads and writes, and on
which of two streams, and looks for two accesses to one byte that nothing orders.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commrt
from commrt.algorithms import ring
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.errors import ScheduleError, UsageError
from commrt.program import dependencies, program
from commrt.proof.spec import all_reduce
from commrt.runtime import executor
from commrt.runtime.executor import bind, scratch_numel
from commrt.testing.ranks import run_ranks
from commrt.transport.protocol import Tag

NOW = Tag(0, 0)
INNER = {"ring": commrt.Ring(), "halving_doubling": commrt.HalvingDoubling(), "torus2d": commrt.Torus2D()}
INNER["both ways"] = commrt.Torus2D(both_ways=True)


class TwoStreams:
    """Notes what is queued where, and who waits for whom."""

    queues = True

    def __init__(self):
        self.now, self.clocks, self.accesses = 0, [{0: 0, 1: 0}, {0: 0, 1: 0}], []

    def record_event(self):
        return dict(self.clocks[self.now])

    def wait_event(self, mark):
        own = self.clocks[self.now]
        self.clocks[self.now] = {stream: max(own[stream], mark[stream]) for stream in own}

    @contextmanager
    def side_stream(self):
        self.now = 1
        yield
        self.now = 0

    def touch(self, tensor, writes):
        if tensor.numel():
            span = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            self.accesses.append((self.now, dict(self.clocks[self.now]), span, writes))

    def step(self):
        """What was touched until now was one piece of work on the current stream."""
        clock = self.clocks[self.now]
        self.clocks[self.now] = {**clock, self.now: clock[self.now] + 1}


def races(streams):
    """Pairs of accesses to one byte, one of them a write, that nothing orders."""
    found = []
    for i, (stream, clock, (low, high), writes) in enumerate(streams.accesses):
        for other, later, (begin, end), also in streams.accesses[i + 1 :]:
            ordered = stream == other or later[stream] > clock[stream]
            if not ordered and (writes or also) and begin < high and low < end:
                found.append(((low, high), (begin, end)))
    return found


class Noted:
    """A transport that notes what is read and written; nothing moves."""

    def __init__(self, streams):
        self._streams = streams

    def bind(self, group):
        def exchange(tag):
            for message in group.sends:
                self._streams.touch(message.data, writes=False)
            for message in group.recvs:
                self._streams.touch(message.data, writes=True)
            self._streams.step()

        return exchange


@pytest.fixture
def streams(monkeypatch):
    noted = TwoStreams()

    def combination(out, *received):
        def combine():
            noted.touch(out, writes=True)
            for part in received:
                noted.touch(part, writes=False)
            noted.step()

        return combine

    monkeypatch.setattr(executor, "adding", lambda out, received: combination(out, *received))
    monkeypatch.setattr(executor, "mixing", lambda out, received, weight: combination(out, received))
    return noted


def run_noted(schedule, rank, streams, numel=4096):
    bound = bind(program(schedule, rank), torch.zeros(numel), Noted(streams), streams=streams)
    bound.run(NOW)
    return bound


@pytest.mark.parametrize("slices", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", INNER)
def test_no_byte_is_touched_by_two_that_nothing_orders(name, ranks, slices, streams):
    schedule = INNER[name].schedule(0, ranks).in_slices(slices)
    for rank in range(ranks):
        streams.__init__()
        run_noted(schedule, rank, streams)
        assert streams.accesses
        assert races(streams) == []


def test_the_oracle_notices_an_exchange_that_does_not_wait(streams, monkeypatch):
    real = executor.dependencies

    def careless(hops, chunks):
        waits = real(hops, chunks)
        return SimpleNamespace(after=(None,) * len(hops), parity=waits.parity, overlap=True)

    monkeypatch.setattr(executor, "dependencies", careless)
    run_noted(ring.all_reduce(4).in_slices(2), 0, streams)
    assert races(streams)


def test_the_oracle_notices_scratch_that_is_used_again_too_early(streams, monkeypatch):
    real = executor.dependencies

    def crowded(hops, chunks):
        waits = real(hops, chunks)
        return SimpleNamespace(after=waits.after, parity=(0,) * len(hops), overlap=True)

    monkeypatch.setattr(executor, "dependencies", crowded)
    run_noted(ring.all_reduce(4).in_slices(2), 0, streams)
    assert races(streams)


def test_slices_are_combined_beside_the_next_exchange_and_a_whole_ring_is_not(streams):
    assert run_noted(ring.all_reduce(4).in_slices(2), 0, streams).streams is streams
    assert run_noted(ring.all_reduce(4), 0, streams).streams is None


def test_what_comes_after_the_program_waits_for_its_last_combination(streams):
    schedule = ring.reduce_scatter(4).in_slices(2)
    run_noted(schedule, 0, streams)
    assert streams.clocks[0][1] == streams.clocks[1][1] == 6


@given(st.sampled_from(sorted(INNER)), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2000))
def test_scratch_is_as_large_as_it_is_said_to_be(name, ranks, slices, numel):
    schedule = INNER[name].schedule(0, ranks).in_slices(slices)
    mine = program(schedule, 0)
    whole = scratch_numel(program(INNER[name].schedule(0, ranks), 0), numel)
    assert scratch_numel(mine, numel) <= 2 * whole + 64
    assert len(dependencies(mine.hops, mine.chunks).after) == len(mine.hops)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_slices_of_an_all_reduce_are_an_all_reduce(name):
    for ranks in (1, 2, 3, 4, 6, 7):
        schedule = commrt.Sliced(ALGORITHMS[name](), 3).schedule(0, ranks)
        assert commrt.verify(schedule, all_reduce(ranks, schedule.chunks)).ok


def test_equal_answers_are_one_object():
    assert commrt.Sliced().schedule(0, 4) is commrt.Sliced().schedule(7, 4)


def test_training_in_slices_ends_with_equal_replicas():
    def body(world):
        model = torch.nn.Linear(40, 30)
        replica = commrt.attach(model, algorithm=commrt.Sliced(commrt.Ring(), 2), world=world)
        model(torch.randn(3, 40)).sum().backward()
        return model.weight.grad.tolist(), replica.replicas_equal()

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first[1]


@pytest.mark.parametrize("slices", [0, -1, 1.5])
def test_less_than_one_slice_is_refused(slices):
    with pytest.raises(UsageError, match="slices"):
        commrt.Sliced(slices=slices)
    if isinstance(slices, int):
        with pytest.raises(ScheduleError, match="cannot be cut in"):
            ring.all_reduce(2).in_slices(slices)
