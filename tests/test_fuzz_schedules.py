# SPDX-License-Identifier: Apache-2.0
"""Whatever a user makes a schedule of: it is proven, priced and run, or refused in words; nothing is rounded."""

from itertools import repeat

import numpy as np
import pytest
import torch
from fuzzing import NUMBERS, VALUES, cases, in_time, met
from hypothesis import example, given
from hypothesis import strategies as st

from commrt.algorithms.gossip import Gossip
from commrt.algorithms.sliced import Sliced
from commrt.algorithms.torus import Torus2D
from commrt.backup_workers.policy import BackupWorkers
from commrt.errors import ScheduleError, UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.program import program
from commrt.proof.replay import prove, verify
from commrt.proof.spec import all_reduce, doubly_stochastic
from commrt.schedule import ADD, Schedule, Step
from commrt.testing.ranks import run_ranks

ABCI = Cluster.named("abci")
ROWS = (
    st.lists(st.integers(-2, 4), max_size=4)
    | st.integers(-2, 4)
    | st.lists(NUMBERS, max_size=3)
    | VALUES
    | st.sampled_from(
        [
            np.zeros((2, 2)),
            np.array(["0", "1"]),
            np.array([0, 1], dtype=np.uint8),
            np.array([2**63], dtype=np.uint64),
            np.array([True, False]),
            np.array([1j]),
            np.array([None, 1]),
            np.array([0.0, 1.0]),
            np.array([0.5]),
            [[0], 1],
        ]
    )
)
COMBINES = st.integers(-1, 4) | VALUES
STEPS = st.tuples(ROWS, ROWS, ROWS, ROWS, COMBINES, NUMBERS | VALUES)
SMALL = st.integers(-1, 3)
PAIR = st.lists(SMALL, min_size=2, max_size=2)
SANE_STEPS = st.tuples(PAIR, PAIR, SMALL, SMALL, st.integers(0, 2), NUMBERS)


def looked_at(schedule):
    """Run everything that reads a schedule."""
    for promise in (all_reduce, doubly_stochastic):
        verify(schedule, promise(schedule.ranks, schedule.chunks))
    schedule.digest()
    str(schedule)
    Pricing(schedule, ABCI).price(1e6)
    for rank in range(min(schedule.ranks, 3)):
        program(schedule, rank)


@cases(100)
@given(st.lists(STEPS | SANE_STEPS, max_size=3), st.integers(1, 4), st.integers(1, 4))
@example([([0], [1], 0, 1, 2, float("inf"))], 2, 1)
@example([([0], [-1], 0, 1, 1, 0.5)], 2, 1)
@example([([0], [1], -1, 1, 1, 0.5)], 2, 1)
@example([([0], [1], 0, 1, 9, 0.5)], 2, 1)
@example([(0, 1, np.zeros((2, 2)), 1, 1, 0.5)], 2, 1)
@example([([0, 1], [1, 0], 0, 1, 2, "much")], 2, 1)
def test_steps_of_anything_make_a_schedule_or_are_refused_in_words(steps, ranks, chunks):
    def look():
        looked_at(Schedule("odd", ranks, chunks, lambda: (Step.of(*step) for step in steps)))

    met(look)


ONE_EACH = {name: [0, 1] for name in ("src", "dst", "lo", "hi", "combine", "weight")}
GUESSES = [0.5, float("nan"), "1", [[0, 1], [2]], None, 2**63, np.array([2**63], dtype=np.uint64), 1j]
REFUSED = [
    *((lambda given=given: Step.of([0], [1], 0, given, ADD), "give|no row of numbers") for given in GUESSES),
    *((lambda name=name: Step(**ONE_EACH | {name: [1]}), "need as many each") for name in ONE_EACH),
    (lambda: Step(**ONE_EACH | {"src": np.zeros((2, 2), np.int64)}), r"of shape \(2, 2\): give a row of numbers"),
    (lambda: Schedule("larger", 2**31, 1, lambda: iter(())), "ranks=2147483648: give a whole number from 1 on"),
    (lambda: Schedule("larger", 1, 2**31, lambda: iter(())), "chunks=2147483648: give a whole number from 1 on"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_columns_are_never_rounded_guessed_or_cut_and_counts_have_31_bits(make, why):
    with pytest.raises(UsageError, match=why):
        make()


def fails():
    yield Step.of(0, 1, 0, 1, ADD)
    raise ZeroDivisionError("one over nothing")


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (fails, "steps.. fails: ZeroDivisionError: one over nothing"),
        (lambda: None, "steps.. fails: TypeError"),
        (lambda: iter([1]), "yields 1 as step 0: yield Step.of"),
        (lambda one: one, "steps.. fails: TypeError"),
    ],
)
def test_steps_that_are_none_are_refused_by_all_who_look_at_them(steps, says):
    schedule = Schedule("odd", 2, 1, steps)
    for look in (str, Schedule.digest, lambda it: prove(it, all_reduce(2, 1)), lambda it: program(it, 0)):
        with pytest.raises(ScheduleError, match=says):
            look(schedule)
    with pytest.raises(ScheduleError, match=says):
        Pricing(schedule, ABCI)
    with pytest.raises(ScheduleError, match=r"fails|yields"):
        str(schedule.over([1, 0]).refined(2).then(schedule.refined(2)))


def test_steps_without_an_end_are_refused_before_long(monkeypatch):
    monkeypatch.setattr("commrt.schedule.MAX_STEPS", 1000)
    schedule = Schedule("endless", 2, 1, lambda: repeat(Step.of([0, 1], [1, 0], 0, 1, ADD)))
    with in_time(60), pytest.raises(ScheduleError, match=r"endless: steps\(\) has yielded 1,032 steps: does it end"):
        prove(schedule, all_reduce(2, 1))


@pytest.mark.parametrize(("ranks", "chunks"), [(10**6, 1), (2**31 - 1, 1), (4, 2**31 - 1), (10**5, 10**5)])
def test_a_proof_that_would_not_fit_is_refused_at_once(ranks, chunks):
    with in_time(20), pytest.raises(ScheduleError, match="too large for a proof"):
        prove(Schedule("vast", ranks, chunks, lambda: iter(())), all_reduce(ranks, chunks))


@cases(100)
@given(VALUES, VALUES, VALUES)
def test_a_schedule_of_anything_is_one_or_is_refused_in_words(ranks, chunks, steps):
    met(Schedule, "odd", ranks, chunks, steps)
    met(Schedule, "odd", ranks, 1, lambda: iter(()))
    met(Schedule, "odd", 2, chunks, lambda: iter(()))


@cases(3)
@given(st.lists(SANE_STEPS, max_size=3), st.integers(1, 3))
def test_a_schedule_that_nobody_proved_runs_or_ends_in_an_error_of_ours(steps, chunks):
    def run(world):
        buffer = torch.ones(48)
        world.run(Schedule("odd", 2, chunks, lambda: (Step.of(*step) for step in steps)), buffer)

    def all_run():
        run_ranks(2, run, timeout_s=1.0)

    met(all_run)


ALGORITHMS = {
    Torus2D: (VALUES | st.tuples(st.integers(-1, 4), st.integers(-1, 4)) | st.tuples(VALUES, VALUES), VALUES),
    BackupWorkers: (VALUES, VALUES | st.just(Torus2D()) | st.just(Torus2D), VALUES),
    Sliced: (VALUES | st.just(Torus2D()), VALUES),
    Gossip: (
        st.sampled_from(["dissemination", "hypercube"]) | VALUES, VALUES,
        st.sampled_from(["weights", "gradients"]) | VALUES,
        st.integers(0, 1) | VALUES, st.integers(1, 2) | VALUES, st.none() | VALUES, st.integers(0, 9) | VALUES,
    ),
}  # fmt: skip


@cases(100)
@given(st.sampled_from(list(ALGORITHMS)).flatmap(lambda kind: st.tuples(st.just(kind), st.tuples(*ALGORITHMS[kind]))))
@example((Torus2D, ((2, "2"), False)))
@example((Torus2D, ((4,), False)))
@example((Torus2D, ([2, 2], False)))
@example((Torus2D, ((2, 2.0), False)))
@example((Gossip, ([], True, "weights", 0, 1, None, 0)))
@example((Gossip, ("dissemination", True, "weights", 0, 1.0, None, 0)))
@example((Gossip, ("dissemination", True, "weights", 0, 1, "much", 0)))
@example((Gossip, ("dissemination", True, "weights", 0, 1, None, -1)))
@example((Gossip, ("dissemination", True, "weights", 0, 1, None, "seed")))
@example((Gossip, ("dissemination", 3, "weights", 0, 1, None, 0)))
@example((Sliced, (3, 2)))
@example((Sliced, (Torus2D(), True)))
def test_an_algorithm_of_anything_makes_schedules_or_is_refused_in_words(made):
    kind, values = made

    def use():
        algorithm = kind(*values)
        for step in (0, 1, 5):
            schedule = algorithm.schedule(step, 4)
            assert schedule.ranks == 4
            schedule.digest()

    if not any(isinstance(value, int) and abs(value) > 10**4 for value in values):  # so many slices take long
        met(use)
