# SPDX-License-Identifier: Apache-2.0
"""Schedules of every collective: how they relate, and what refuses them; all ranks get the same bits.

`test_prove` proves them, and that they cost what their docstrings say.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from commrt.algorithms import bruck, chain, direct, halving_doubling, ring, tree
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, ROOTED, candidates
from commrt.algorithms.parts import backwards
from commrt.algorithms.sliced import Sliced
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError, UsageError
from commrt.proof import spec
from commrt.proof.replay import traffic, verify
from commrt.schedule import ADD, COPY, Schedule, Step
from commrt.testing.ranks import run_ranks


def test_equal_arguments_give_the_same_object():
    for collective in COLLECTIVES:
        root = 3 if collective in ROOTED else 0
        one, again = (candidates(collective, 8, root) for _ in range(2))
        assert [name for name in one if one[name] is not again[name]] == [], collective
    for algorithm in (*(make() for make in ALGORITHMS.values()), Torus2D(both_ways=True), Sliced()):
        assert algorithm.schedule(0, 12) is algorithm.schedule(7, 12), algorithm


def test_another_root_only_gives_the_ranks_other_parts():
    for collective in ("broadcast", "reduce"):
        first, third = candidates(collective, 6), candidates(collective, 6, 2)
        turned = {name: first[name].over((np.arange(6) + 2) % 6).digest() for name in ("tree", "direct", "chain")}
        assert turned == {name: third[name].digest() for name in turned}


def test_a_schedule_backwards_twice_is_the_schedule_again():
    broadcasts = [(build, (1, 0), (6, 4)) for build in (tree.broadcast, direct.broadcast, chain.broadcast)]
    scatters = [(build, (7, 0), (8, 5)) for build in (tree.scatter, direct.scatter)]
    unrooted = (bruck.all_gather, direct.all_gather, ring.all_gather, direct.pairwise_all_to_all)
    for build, *given in (*broadcasts, *scatters, *((build, (2,), (7,)) for build in unrooted)):
        for schedule in (build(*each) for each in given):
            there = backwards(schedule, ADD)
            assert there.name == f"{schedule.name} backwards"
            assert backwards(there, COPY).digest() == schedule.digest(), schedule.name


def test_backwards_a_schedule_that_brings_a_chunk_twice_is_refused_by_the_proof():
    twice = Schedule("twice", 2, 1, lambda: iter([Step.of(0, 1, 0, 1, COPY)] * 2))
    assert verify(twice, spec.broadcast(2, 1)).ok
    assert "a second time" in str(verify(backwards(twice, ADD), spec.reduce(2, 1)).counterexample)


@pytest.mark.parametrize(("slices", "steps"), [(1, 6), (2, 7), (9, 14)])
def test_a_chain_of_any_number_of_slices_is_one_pipeline(slices, steps):
    there, back = chain.broadcast(7, 3, slices), chain.reduce(7, 3, slices)
    assert verify(there, spec.broadcast(7, slices, 3)).ok
    assert verify(back, spec.reduce(7, slices, 3)).ok
    assert [traffic(each).steps for each in (there, back)] == [steps, steps]


def test_a_chain_makes_so_many_slices_that_its_steps_carry_at_most_five_quarters_of_the_buffer():
    chains = [chain.broadcast(ranks) for ranks in (2, 3, 5, 9, 17, 39)]
    assert max(Fraction(traffic(each).steps, each.chunks) for each in chains) <= Fraction(5, 4)


def summed(world, schedule):
    """What a rank holds after `schedule`, and what it should, nearly."""
    rows = torch.randn(schedule.ranks, 5 * schedule.chunks, generator=torch.Generator().manual_seed(schedule.ranks))
    total = rows.sum(dim=0)
    world.run(schedule, buffer := rows[world.rank])
    assert torch.allclose(buffer, total, atol=1e-4)
    return buffer.numpy().tobytes()


@pytest.mark.parametrize("name", COLLECTIVES["all_reduce"])
def test_after_an_all_reduce_of_floats_all_ranks_hold_the_same_bits(name):
    for ranks in (2, 3, 4, 6, 8, 13):
        schedule = COLLECTIVES["all_reduce"][name](ranks)
        assert len({*run_ranks(ranks, lambda world, schedule=schedule: summed(world, schedule))}) == 1, ranks


def test_the_candidates_are_those_that_take_the_rank_count():
    assert list(candidates("all_gather", 8)) == ["ring", "doubling", "bruck", "direct"]
    assert list(candidates("all_gather", 6)) == ["ring", "bruck", "direct"]
    assert list(candidates("reduce_scatter", 6)) == ["ring", "bruck", "direct"]
    assert list(candidates("all_gather", 1025)) == ["ring", "bruck"]
    assert list(candidates("all_to_all", 1025)) == ["pairwise"]
    assert list(candidates("broadcast", 1025)) == ["tree", "direct", "chain", "scatter_gather"]


NAMES = "all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter, scatter"
REFUSED = {
    r"slices=0: a buffer is cut into 1, 2, \.\.\. slices": [
        lambda: chain.broadcast(4, slices=0),
        lambda: chain.reduce(4, slices=0),
    ],
    r"take 1, 2, 4, 8, \.\.\. ranks, not 6": [
        lambda: halving_doubling.reduce_scatter(6),
        lambda: halving_doubling.all_gather(6),
    ],
    "takes up to 1,024 ranks": [
        lambda: direct.all_gather(1025),
        lambda: direct.reduce_scatter(1025),
        lambda: direct.all_reduce(1025),
        lambda: direct.all_to_all(1025),
    ],
    f"no collective is called 'alltoall': choose one of {NAMES}": [
        lambda: candidates("alltoall", 4),
        lambda: spec.collective_of("alltoall", 4, 4),
    ],
    "rank 4 cannot be the root of a broadcast over 4 ranks": [lambda: candidates("broadcast", 4, 4)],
    "rank -1 cannot be the root of a all_gather over 4 ranks": [lambda: candidates("all_gather", 4, -1)],
    "rank 0 cannot be the root of a broadcast over 0 ranks": [lambda: candidates("broadcast", 0, 0)],
    r"choose one of 0\.\.2": [lambda: tree.broadcast(3, root=5)],
    "too large for a proof": [
        lambda: spec.gather(4096, 1 << 24),
        lambda: spec.scatter(4096, 1 << 24),
        lambda: spec.all_to_all(4096, 1 << 24),
        lambda: spec.all_gather(4096, 1 << 24),
        lambda: spec.reduce_scatter(4096, 1 << 24),
    ],
    r"members \[4\] must be": [
        lambda: spec.gather(4, 4, root=4),
        lambda: spec.scatter(4, 4, root=4),
        lambda: spec.broadcast(4, 1, root=4),
    ],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_schedule_or_no_promise_is_refused(why):
    for make in REFUSED[why]:
        with pytest.raises((UsageError, ScheduleError), match=why):
            make()


def made_of(*transfers, ranks, chunks):
    steps = [Step.of(src, dst, lo, hi, COPY) for src, dst, lo, hi in transfers]
    return Schedule("made", ranks, chunks, lambda: iter(steps))


@pytest.mark.parametrize(
    ("schedule", "promise", "says"),
    [
        (
            made_of((1, 0, 1, 2), ranks=3, chunks=3),
            spec.gather(3, 3),
            "rank 0, chunk 2: ends with",
        ),
        (made_of((1, 0, 0, 1), ranks=2, chunks=2), spec.gather(2, 2), "sends this chunk before it holds a value"),
        (made_of((0, 1, 0, 1), ranks=2, chunks=2), spec.scatter(2, 2), "rank 1, chunk 1: ends with"),
        (made_of((0, 1, 0, 1), ranks=2, chunks=2), spec.scatter(2, 2, root=1), "sends this chunk before it holds"),
        (made_of((0, 1, 1, 2), ranks=2, chunks=4), spec.all_to_all(2, 4), "rank 0, chunk 2: ends with"),
        (made_of((1, 0, 1, 2), ranks=2, chunks=4), spec.all_to_all(2, 4), "sends this chunk before it holds a value"),
    ],
    ids=[
        "a piece is missing",
        "not its own piece",
        "the wrong piece",
        "not the root",
        "a row is missing",
        "no own row",
    ],
)
def test_a_collective_that_moves_something_else_is_refused(schedule, promise, says):
    assert says in str(verify(schedule, promise).counterexample)


def test_other_ranks_than_the_root_of_a_gather_may_hold_anything():
    assert verify(made_of((1, 0, 1, 2), (1, 2, 1, 2), (2, 0, 2, 3), ranks=3, chunks=3), spec.gather(3, 3)).ok
