# SPDX-License-Identifier: Apache-2.0
"""A program on a buffer does what its schedule says, whatever the sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from combining_races import TwoStreams, races, run_noted
from local_loops import ends_equal

import commrt
from commrt.algorithms import ring
from commrt.algorithms.sliced import Sliced, in_slices
from commrt.program import program
from commrt.proof.spec import all_reduce
from commrt.runtime import executor
from commrt.runtime.executor import bind
from commrt.schedule import ADD, COPY, Schedule, Step
from commrt.testing.ranks import run_ranks
from commrt.transport.local import Fabric, LocalTransport


def test_additions_to_overlapping_ranges_happen_range_by_range():
    step = Step.of([1, 2, 3], 0, [0, 1, 0], [2, 3, 2], ADD)
    schedule = Schedule("overlapping", 4, 3, lambda: iter([step]))

    def body(world):
        buffer = torch.full((24,), [0.0, 1e8, 1.0, -1e8][world.rank])
        world.run(schedule, buffer)
        return buffer

    chunk = run_ranks(4, body)[0][8:16]
    in_order = (torch.tensor(0.0) + 1e8 - 1e8) + 1.0
    assert torch.equal(chunk, in_order.expand(8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64], ids=str)
def test_a_star_adds_all_that_arrives_at_once_without_losing_bits(dtype):
    gather, spread = Step.of([1, 2, 3], 0, 0, 1, ADD), Step.of(0, [1, 2, 3], 0, 1, COPY)
    star = Schedule("star", 4, 1, lambda: iter([gather, spread]))
    commrt.prove(star, all_reduce(4, 1))
    value = 2**20 + 1j if dtype.is_complex else 2**24 + 1

    def body(world):
        buffer = torch.full((5,), value, dtype=dtype)
        world.run(star, buffer)
        return buffer

    assert all(buffer.tolist() == [4 * value] * 5 for buffer in run_ranks(4, body))


@pytest.mark.parametrize(
    ("hop", "reads"),
    [
        ([(0, 1, 0, ADD), (1, 0, 1, ADD)], True),
        ([(0, 1, 0, ADD), (1, 0, 0, ADD)], False),  # the peer reads what this rank would change
        ([(0, 1, 0, ADD), (1, 0, 1, COPY)], False),
        ([(0, 1, 0, ADD), (1, 0, 1, ADD), (1, 0, 2, COPY)], False),
        ([(1, 0, 1, ADD), (1, 0, 2, ADD)], True),
    ],
)
def test_a_rank_only_reads_what_it_adds_to_chunks_that_it_does_not_send(hop, reads):
    step = Step.of(*map(list, zip(*[(src, dst, lo, lo + 1) for src, dst, lo, _ in hop], strict=True)), COPY)
    step = replace(step, combine=[combine for *_, combine in hop])
    groups = []

    class Recorded(LocalTransport):
        def bind(self, group):
            groups.append(group)
            return super().bind(group)

    bind(program(Schedule("a hop", 2, 4, lambda: iter([step])), 0), torch.zeros(64), Recorded(Fabric(2), 0))
    assert [group.reads for group in groups] == [reads]


# Slices: what arrived in one hop may be combined beside the next exchange, never while either touches the other's
# memory. `dev/combining_races.py` searches for such accesses, and `test_prove` runs it over schedules.


@pytest.mark.parametrize("broken", ["after", "parity"], ids=["an exchange does not wait", "scratch is used too early"])
def test_the_oracle_notices_a_race(broken, monkeypatch):
    real, streams = executor.dependencies, TwoStreams()

    def careless(hops, chunks):
        waits = real(hops, chunks)
        nothing = {"after": (None,) * len(hops), "parity": (0,) * len(hops)}
        return SimpleNamespace(**{"after": waits.after, "parity": waits.parity, broken: nothing[broken]}, overlap=True)

    monkeypatch.setattr(executor, "dependencies", careless)
    run_noted(in_slices(ring.all_reduce(4), 2), 0, streams)
    assert races(streams)


def test_slices_are_combined_beside_the_next_exchange_and_a_whole_ring_is_not():
    streams = TwoStreams()
    assert run_noted(in_slices(ring.all_reduce(4), 2), 0, streams).streams is streams
    assert run_noted(ring.all_reduce(4), 0, streams).streams is None


def test_what_comes_after_the_program_waits_for_its_last_combination():
    streams = TwoStreams()
    run_noted(in_slices(ring.reduce_scatter(4), 2), 0, streams)
    assert streams.clocks[0][1] == streams.clocks[1][1] == 6


@ends_equal(3)
def test_training_in_slices_ends_with_equal_replicas(world):
    model = torch.nn.Linear(40, 30)
    replica = commrt.attach(model, algorithm=Sliced(commrt.Ring(), 2), world=world)
    model(torch.randn(3, 40)).sum().backward()
    assert replica.replicas_equal()
    return model.weight.grad
