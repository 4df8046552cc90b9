# SPDX-License-Identifier: Apache-2.0
"""Schedules of every collective: each is proven and costs what its docstring says; all ranks get the same bits."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from commrt.algorithms import bruck, chain, direct, halving_doubling, pairwise, ring, tree
from commrt.algorithms.catalogue import COLLECTIVES, ROOTED, candidates
from commrt.algorithms.parts import backwards
from commrt.errors import ScheduleError, UsageError
from commrt.proof import spec
from commrt.proof.replay import verify
from commrt.schedule import ADD, COPY, Schedule, Step, traffic

RANKS = [*range(1, 34), 64]
SCHEDULES = [(collective, name) for collective, named in COLLECTIVES.items() for name in named]
CHECKED_ELSEWHERE = [("all_reduce", name) for name in ("ring", "halving_doubling", "torus2d", "double_tree")]


def roots(collective, ranks):
    return sorted({0, 1 % ranks, ranks // 2, ranks - 1}) if collective in ROOTED else [0]


def doublings(p):
    """ceil(log2(p))"""
    return (p - 1).bit_length()


def up_to_half(p):
    """Chunks that the busiest rank of a tree sends towards the root."""
    half = 1 << max(0, doublings(p) - 1)
    return max(p - half, half // 2)


def is_power(p):
    return p & (p - 1) == 0


ALL_BUT_ONE = (lambda p: p - 1, lambda p: Fraction(p - 1, p))
LOGARITHMIC = (doublings, lambda p: Fraction(p - 1, p))
AT_ONCE = (lambda _: 1, lambda p: Fraction(p - 1, p))
COSTS = {
    "broadcast tree": (doublings, doublings),
    "broadcast direct": (lambda _: 1, lambda p: p - 1),
    "broadcast chain": (lambda p: p - 2 + 4 * p - 7, lambda _: 1),
    "broadcast scatter_gather": (lambda p: doublings(p) + p - 1, lambda p: Fraction(2 * (p - 1), p)),
    "reduce tree": (doublings, lambda _: 1),
    "reduce direct": (lambda _: 1, lambda _: 1),
    "reduce chain": (lambda p: p - 2 + 4 * p - 7, lambda _: 1),
    "reduce scatter_gather": (lambda p: p - 1 + doublings(p), lambda p: Fraction(p - 1 + up_to_half(p), p)),
    "gather tree": (doublings, lambda p: Fraction(up_to_half(p), p)),
    "gather direct": (lambda _: 1, lambda p: Fraction(1, p)),
    "scatter tree": LOGARITHMIC,
    "scatter direct": AT_ONCE,
    "all_gather ring": ALL_BUT_ONE,
    "all_gather doubling": LOGARITHMIC,
    "all_gather bruck": LOGARITHMIC,
    "all_gather direct": AT_ONCE,
    "reduce_scatter ring": ALL_BUT_ONE,
    "reduce_scatter halving": LOGARITHMIC,
    "reduce_scatter bruck": LOGARITHMIC,
    "reduce_scatter direct": AT_ONCE,
    "all_reduce doubling": (
        lambda p: p.bit_length() - 1 + 2 * (not is_power(p)),
        lambda p: p.bit_length() - 1 + (not is_power(p)),
    ),
    "all_reduce direct": (lambda _: 2, lambda p: Fraction(2 * (p - 1), p)),
    "all_to_all pairwise": (lambda p: p - 1, lambda p: Fraction(p - 1, p * p)),
    "all_to_all direct": (lambda _: 1, lambda p: Fraction(p - 1, p * p)),
    "barrier dissemination": LOGARITHMIC,
}
"""Steps and bytes of the busiest rank, in buffers, for two ranks or more."""


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_of_a_collective_is_proven_from_every_kind_of_root(collective, ranks):
    for root in roots(collective, ranks):
        for name, schedule in candidates(collective, ranks, root).items():
            promise = spec.collective_of(collective, ranks, schedule.chunks, root)
            assert (name, root, verify(schedule, promise).counterexample) == (name, root, None)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_is_right_with_several_chunks_per_piece(collective, ranks):
    for schedule in candidates(collective, ranks).values():
        fine = schedule.refined(3)
        assert verify(fine, spec.collective_of(collective, ranks, fine.chunks)).counterexample is None


@pytest.mark.parametrize(("collective", "name"), sorted({*SCHEDULES} - {*CHECKED_ELSEWHERE}))
def test_every_schedule_costs_what_its_docstring_says(collective, name):
    steps, sent = COSTS[f"{collective} {name}"]
    for ranks in (*range(2, 18), 33, 64):
        for root in roots(collective, ranks):
            schedule = candidates(collective, ranks, root).get(name)
            if schedule is None:
                assert not is_power(ranks)
                continue
            cost = traffic(schedule)
            assert (ranks, cost.steps, cost.bytes_per_rank) == (ranks, steps(ranks), sent(ranks))


@pytest.mark.parametrize(("collective", "name"), SCHEDULES)
def test_one_rank_needs_no_step_in_any_collective(collective, name):
    assert list(candidates(collective, 1)[name].steps()) == []


@pytest.mark.parametrize(("collective", "name"), SCHEDULES)
def test_equal_arguments_give_the_same_object(collective, name):
    root = 3 if collective in ROOTED else 0
    assert candidates(collective, 8, root)[name] is candidates(collective, 8, root)[name]


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("name", ["tree", "direct", "chain"])
def test_another_root_only_gives_the_ranks_other_parts(collective, name):
    turned = candidates(collective, 6)[name].over((np.arange(6) + 2) % 6)
    assert candidates(collective, 6, 2)[name].digest() == turned.digest()


TWO_WAYS = [
    *(build(p, root) for build in (tree.broadcast, direct.broadcast, chain.broadcast) for p, root in ((1, 0), (6, 4))),
    *(build(p, root) for build in (tree.scatter, direct.scatter) for p, root in ((7, 0), (8, 5))),
    *(
        build(p)
        for build in (bruck.all_gather, direct.all_gather, ring.all_gather, pairwise.all_to_all)
        for p in (2, 7)
    ),
]


@pytest.mark.parametrize("schedule", TWO_WAYS, ids=lambda schedule: f"{schedule.name}-{schedule.ranks}")
def test_a_schedule_backwards_twice_is_the_schedule_again(schedule):
    there = backwards(schedule, ADD)
    assert there.name == f"{schedule.name} backwards"
    assert backwards(there, COPY).digest() == schedule.digest()


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


@pytest.mark.parametrize("ranks", range(2, 40))
def test_a_chain_makes_so_many_slices_that_its_steps_carry_at_most_five_quarters_of_the_buffer(ranks):
    schedule = chain.broadcast(ranks)
    assert Fraction(traffic(schedule).steps, schedule.chunks) <= Fraction(5, 4)


@pytest.mark.parametrize("build", [chain.broadcast, chain.reduce])
def test_a_chain_of_no_slice_is_refused(build):
    with pytest.raises(UsageError, match=r"slices=0: a buffer is cut into 1, 2, \.\.\. slices"):
        build(4, slices=0)


def summed(schedule, seed):
    """What each rank holds after `schedule`, in fp32, adding to its own value in order of sender."""
    start = np.random.default_rng(seed).standard_normal((schedule.ranks, schedule.chunks, 5)).astype(np.float32)
    buffer = start.copy()
    for step in map(Step.canonical, schedule.steps()):
        before = buffer.copy()
        for src, dst, lo, hi, combine, _ in zip(*(column.tolist() for column in step.columns), strict=True):
            own = buffer[dst, lo:hi] if combine == ADD else np.float32(0)
            buffer[dst, lo:hi] = own + before[src, lo:hi]
    assert np.allclose(buffer, start.sum(axis=0), atol=1e-4)
    return buffer


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 13, 16])
@pytest.mark.parametrize("name", COLLECTIVES["all_reduce"])
def test_after_an_all_reduce_of_floats_all_ranks_hold_the_same_bits(name, ranks):
    buffer = summed(candidates("all_reduce", ranks)[name], seed=ranks)
    assert {row.tobytes() for row in buffer} == {buffer[0].tobytes()}


def test_the_candidates_are_those_that_take_the_rank_count():
    assert list(candidates("all_gather", 8)) == ["ring", "doubling", "bruck", "direct"]
    assert list(candidates("all_gather", 6)) == ["ring", "bruck", "direct"]
    assert list(candidates("reduce_scatter", 6)) == ["ring", "bruck", "direct"]
    assert list(candidates("all_gather", 1025)) == ["ring", "bruck"]
    assert list(candidates("all_to_all", 1025)) == ["pairwise"]
    assert list(candidates("broadcast", 1025)) == ["tree", "direct", "chain", "scatter_gather"]


def test_an_unknown_collective_is_refused_with_the_list_of_all():
    names = "all_gather, all_reduce, all_to_all, barrier, broadcast, gather, reduce, reduce_scatter, scatter"
    for asked in (candidates, lambda name, ranks: spec.collective_of(name, ranks, ranks)):
        with pytest.raises(UsageError, match=f"no collective is called 'alltoall': choose one of {names}"):
            asked("alltoall", 4)


@pytest.mark.parametrize(("ranks", "root"), [(4, 4), (4, -1), (0, 0)])
@pytest.mark.parametrize("collective", ["broadcast", "all_gather"])
def test_a_root_outside_the_ranks_is_refused(collective, ranks, root):
    with pytest.raises(UsageError, match=f"rank {root} cannot be the root of a {collective} over {ranks} ranks"):
        candidates(collective, ranks, root)


@pytest.mark.parametrize("build", [halving_doubling.reduce_scatter, halving_doubling.all_gather])
def test_halving_and_doubling_refuse_other_rank_counts_than_powers_of_two(build):
    with pytest.raises(UsageError, match=r"take 1, 2, 4, 8, \.\.\. ranks, not 6"):
        build(6)


def test_many_ranks_that_all_exchange_at_once_are_refused():
    for build in (direct.all_gather, direct.reduce_scatter, direct.all_reduce, direct.all_to_all):
        with pytest.raises(UsageError, match="takes up to 1,024 ranks"):
            build(1025)


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


@pytest.mark.parametrize("build", [spec.gather, spec.scatter, spec.all_to_all, spec.all_gather, spec.reduce_scatter])
def test_a_promise_that_would_not_fit_is_refused_at_once(build):
    with pytest.raises(ScheduleError, match="too large for a proof"):
        build(4096, 1 << 24)


@pytest.mark.parametrize("build", [spec.gather, spec.scatter])
def test_a_promise_to_a_root_that_does_not_exist_is_refused(build):
    with pytest.raises(ScheduleError, match=r"members \[4\] must be"):
        build(4, 4, root=4)
