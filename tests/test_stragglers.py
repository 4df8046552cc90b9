# SPDX-License-Identifier: Apache-2.0
"""When gradients come, and how many of them to wait for.

Figures called published are as recalled, not checked against the paper; the targets beside them are our own estimates.
"""

from __future__ import annotations

import re
from functools import reduce
from itertools import product
from math import inf

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from commrt.errors import UsageError
from commrt.tools.planning.stragglers import (
    Exponential,
    HeavyTails,
    Published,
    Scaling,
    SlowSteps,
    choose,
    kth_time_s,
    step_time_s,
)

ESTIMATED_S = {1: 1.23, 50: 1.46, 80: 1.54, 90: 1.58, 94: 1.61, 95: 1.63, 96: 1.65, 97: 1.70, 98: 1.81, 99: 2.16}
"""k to mean time of the k-th of 100 gradients, by an earlier sampling of the same family of laws; the 100th: 4.99."""


def rng(seed=0):
    return np.random.default_rng(seed)


def sampled(law, ranks=100, steps=10_000, seed=0):
    return law.sample(rng(seed), steps, ranks)


PAPER = sampled(HeavyTails())
TIMES = arrays(np.float64, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=st.floats(0.125, 64, width=16))


def expected_kth_s(law, ranks):
    """[ranks]: the mean time of the k-th gradient of a step, in closed form."""
    if isinstance(law, Exponential):  # after k gradients the next comes from the ranks - k that are left
        return law.constant_s + np.cumsum(1 / np.arange(ranks, 0, -1)) / law.rate_per_s
    chances = reduce(np.convolve, [(1 - law.chance, law.chance)] * ranks, np.ones(1))
    slow, k = np.arange(ranks + 1)[:, None], np.arange(1, ranks + 1)
    place = np.maximum(k - (ranks - slow), 0)  # the j-th of m slow ones is expected j / (m + 1) of the way up
    factor = np.where(place > 0, law.low + (law.high - law.low) * place / (slow + 1), 1.0)
    return law.base_s * (chances @ factor)


SLOW = (SlowSteps(), SlowSteps(2.0, 0.5, 1.0, 3.0), SlowSteps(chance=0.2, low=4.0, high=4.0))


@for_each(("law", "ranks"), product([Exponential(), Exponential(0.0, 4.0), *SLOW], [1, 8, 33]))
def test_samples_tend_to_closed_forms(law, ranks):
    kth_s = np.sort(sampled(law, ranks, 10_000), axis=1)
    error_s = kth_s.std(axis=0) / np.sqrt(len(kth_s))
    rare_s = 1e-3  # what too few steps show at all, such as eight slow ranks of eight
    assert (np.abs(kth_s.mean(axis=0) - expected_kth_s(law, ranks)) <= 5 * error_s + rare_s).all()


def test_the_fit_meets_the_two_published_percentages_and_the_estimated_times():
    arrivals_s, kth_s = np.sort(PAPER, axis=1), kth_time_s(PAPER)
    assert (arrivals_s[:, 97] < 2).mean() == pytest.approx(0.80, abs=0.06)
    assert (arrivals_s[:, 99] < 2).mean() == pytest.approx(0.30, abs=0.06)
    assert arrivals_s.max() <= 310
    assert {k: kth_s[k - 1] for k in ESTIMATED_S} == pytest.approx(ESTIMATED_S, rel=0.02)
    assert kth_s[99] == pytest.approx(4.99, rel=0.12)  # the mean of a tail whose variance is in the cap


def test_steps_have_something_in_common():
    medians = np.median(PAPER[:, :50], axis=1), np.median(PAPER[:, 50:], axis=1)
    assert np.corrcoef(*medians)[0, 1] > 0.95


@given(TIMES)
def test_gradients_come_one_after_the_other_and_uninterrupted_late_ranks_only_make_steps_longer(times_s):
    kth_s = kth_time_s(times_s)
    assert (np.diff(kth_s) >= 0).all()
    assert kth_s.sum() == pytest.approx(times_s.mean(axis=0).sum())
    steps_s = step_time_s(times_s, np.arange(1, len(kth_s) + 1))
    assert (steps_s >= kth_s - 1e-9).all()
    assert steps_s[-1] == pytest.approx(kth_s[-1])


def test_a_late_rank_misses_the_steps_in_which_it_is_not_done():
    times_s = np.array([[1.0, 1.0, 9.0], [1.0, 2.0, 1.0], [9.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    # steps end at 1, at 3, at 10, when the third rank, free from 9 on, is the second one to be done, and at 11
    assert step_time_s(times_s, [2, 3]).tolist() == [11 / 4, 21 / 4]
    assert kth_time_s(times_s)[1:].tolist() == [1.0, 21 / 4]


@settings(max_examples=40)  # each draws its steps again a hundred times
@given(TIMES, st.floats(0.125, 1).map(Scaling))
def test_the_best_split_is_the_cheapest(times_s, goal):
    choice = choose(times_s, goal, rng())
    assert choice.goal_s[choice.best - 1] == choice.goal_s.min()
    assert 1 <= choice.likely[0] <= choice.likely[1] <= len(choice.kth_s)


def test_all_are_waited_for_if_nobody_straggles_and_the_first_if_more_do_not_help_and_no_free_one_is_wasted():
    assert choose(np.full((5, 40), 3.0), Scaling(0.125), rng()).likely == (40, 40)
    assert choose(PAPER[:100], Scaling(0.0), rng()).best == 1
    assert choose(np.array([[1.0, 1.0, 1.0, 2.0]]), Scaling(0.0), rng()).best == 3


def test_a_few_steps_do_not_decide_what_many_do():
    few, many = (choose(times_s, Published(), rng()).likely for times_s in (PAPER[:20], PAPER[:2000]))
    assert few[1] - few[0] > many[1] - many[0]


@for_each(
    ("build", "says"),
    [
        (lambda: HeavyTails(tail_chance=1.5), "tail_chance is 1.5: it must be between 0 and 1"),
        (lambda: HeavyTails(cap_s=1.0), "cap_s is 1: it must be at least 1.1, and finite"),
        (lambda: Exponential(rate_per_s=-1.0), "rate_per_s is -1: it must be at least 1e-09"),
        (lambda: Exponential(constant_s=inf), "constant_s is inf: it must be at least 0, and finite"),
        (lambda: SlowSteps(chance=-0.1), "chance is -0.1: it must be between 0 and 1"),
        (lambda: SlowSteps(low=0.5), "low is 0.5: it must be at least 1"),
        (lambda: SlowSteps(low=5.0, high=4.0), "high is 4: it must be at least 5"),
        (lambda: Scaling(1.5), "an exponent of 1.5: give one between 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(build, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        build()
