# SPDX-License-Identifier: Apache-2.0
"""What arrived in one hop may be combined beside the next exchange: never while either touches the other's memory.

`dev/combining_races.py` searches for such accesses; `test_prove` runs it over schedules. Here it must find two bugs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "dev"))

from combining_races import TwoStreams, races, run_noted

import commrt
from commrt.algorithms import ring
from commrt.algorithms.sliced import in_slices
from commrt.errors import ScheduleError, UsageError
from commrt.program import dependencies, program
from commrt.runtime import executor
from commrt.runtime.executor import scratch_numel
from commrt.testing.ranks import run_ranks

INNER = {"ring": commrt.Ring(), "halving_doubling": commrt.HalvingDoubling(), "torus2d": commrt.Torus2D()}
INNER["both ways"] = commrt.Torus2D(both_ways=True)


@pytest.fixture
def streams():
    return TwoStreams()


@pytest.mark.parametrize("broken", ["after", "parity"], ids=["an exchange does not wait", "scratch is used too early"])
def test_the_oracle_notices_a_race(broken, streams, monkeypatch):
    real = executor.dependencies

    def careless(hops, chunks):
        waits = real(hops, chunks)
        nothing = {"after": (None,) * len(hops), "parity": (0,) * len(hops)}
        return SimpleNamespace(**{"after": waits.after, "parity": waits.parity, broken: nothing[broken]}, overlap=True)

    monkeypatch.setattr(executor, "dependencies", careless)
    run_noted(in_slices(ring.all_reduce(4), 2), 0, streams)
    assert races(streams)


def test_slices_are_combined_beside_the_next_exchange_and_a_whole_ring_is_not(streams):
    assert run_noted(in_slices(ring.all_reduce(4), 2), 0, streams).streams is streams
    assert run_noted(ring.all_reduce(4), 0, streams).streams is None


def test_what_comes_after_the_program_waits_for_its_last_combination(streams):
    schedule = in_slices(ring.reduce_scatter(4), 2)
    run_noted(schedule, 0, streams)
    assert streams.clocks[0][1] == streams.clocks[1][1] == 6


@given(st.sampled_from(sorted(INNER)), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2000))
def test_scratch_is_as_large_as_it_is_said_to_be(name, ranks, slices, numel):
    schedule = in_slices(INNER[name].schedule(0, ranks), slices)
    mine = program(schedule, 0)
    whole = scratch_numel(program(INNER[name].schedule(0, ranks), 0), numel)
    assert scratch_numel(mine, numel) <= 2 * whole + 64
    assert len(dependencies(mine.hops, mine.chunks).after) == len(mine.hops)


def test_training_in_slices_ends_with_equal_replicas():
    def body(world):
        model = torch.nn.Linear(40, 30)
        replica = commrt.attach(model, algorithm=commrt.algorithms.Sliced(commrt.Ring(), 2), world=world)
        model(torch.randn(3, 40)).sum().backward()
        return model.weight.grad.tolist(), replica.replicas_equal()

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first[1]


@pytest.mark.parametrize("slices", [0, -1, 1.5])
def test_less_than_one_slice_is_refused(slices):
    with pytest.raises(UsageError, match="slices"):
        commrt.algorithms.Sliced(slices=slices)
    if isinstance(slices, int):
        with pytest.raises(ScheduleError, match="cannot be cut in"):
            in_slices(ring.all_reduce(2), slices)
