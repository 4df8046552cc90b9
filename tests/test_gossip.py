# SPDX-License-Identifier: Apache-2.0
"""Gossip as schedules: who meets whom, what that keeps, and what it costs."""

import random
from dataclasses import replace
from fractions import Fraction
from statistics import median

import numpy as np
import pytest
import torch
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from commrt.algorithms.gossip import Gossip, dissemination, hypercube, period, permutation
from commrt.errors import UsageError
from commrt.proof.replay import prove, traffic
from commrt.proof.spec import promise
from commrt.tools.planning.mixing import mixing, steps_to_meet_all

POWERS = [1, 2, 4, 8, 16, 32, 64, 128]

ROUND = {5: (0.202, 0.625, 1.25), 6: (0.217, 0.75, 1.5), 12: (0.209, 0.75, 1.5), 24: (0.207, 0.75, 1.5)}
ROUND |= {48: (0.207, 0.75, 1.5), 100: (0.192, 0.781, 1.5625)}
"""Ranks to second singular value, smallest and largest share times ranks, after a period."""


def one_period(algorithm, ranks, number=0):
    steps = algorithm.period(ranks)
    return [algorithm.schedule(step, ranks) for step in range(number * steps, (number + 1) * steps)]


@pytest.mark.parametrize("topology", ["dissemination", "hypercube"])
def test_after_a_period_a_power_of_two_ranks_hold_the_exact_mean(topology):
    for ranks in POWERS:
        report = mixing(one_period(Gossip(topology), ranks, 5))
        assert (ranks, report.smallest, report.largest) == (ranks, 1.0, 1.0)
        assert report.second_singular_value < 1e-9


def test_other_sizes_come_as_near_as_the_rule_says():
    for ranks, wanted in ROUND.items():
        report = mixing(one_period(Gossip(), ranks))
        found = ranks, report.second_singular_value, report.smallest, report.largest
        assert found == pytest.approx((ranks, *wanted), abs=6e-4)


@given(st.integers(2, 200), st.integers(0, 10_000))
def test_a_step_costs_one_partner_and_one_buffer_however_many_ranks_there_are(ranks, step):
    cost = traffic(Gossip().schedule(step, ranks))
    assert (cost.steps, cost.transfers, cost.bytes_per_rank) == (1, ranks, Fraction(1))
    assert cost.max_peers <= 2


def test_with_rotation_all_meet_directly_in_about_as_many_steps_as_drawing_lots_takes():
    for ranks, about in ((8, 41), (16, 76), (32, 212), (64, 449)):
        found = median(steps_to_meet_all(Gossip(seed=seed), ranks, 10_000) for seed in range(5))
        assert about / 2 < found < 2 * about, ranks


@given(st.integers(1, 100), st.integers(0, 50), st.integers(0, 2**31))
def test_places_are_a_permutation_that_follows_from_seed_and_period_alone(ranks, number, seed):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    where = permutation(ranks, number, seed)
    permutation.cache_clear()
    assert sorted(where.tolist()) == [*range(ranks)]
    assert where.tolist() == permutation(ranks, number, seed).tolist()
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002


def test_partners_change_places_after_a_period_and_otherwise_with_another_seed():
    ranks, algorithm = 16, Gossip()
    digests = [algorithm.schedule(step, ranks).digest() for step in range(3 * period(ranks))]
    assert len(set(digests)) == len(digests)
    assert repr(Gossip(seed=1)) != repr(Gossip())  # by which ranks notice that they differ
    assert Gossip(seed=1).schedule(0, ranks).digest() == digests[0]
    assert Gossip(seed=1).schedule(period(ranks), ranks).digest() != digests[period(ranks)]
    assert Gossip(rotate=False).schedule(period(ranks), ranks).digest() == digests[0]
    assert Gossip(rotate=False).schedule(3, 8) is Gossip(rotate=False).schedule(0, 8)  # what was made of it is kept


def test_a_late_message_counts_a_quarter():
    assert (Gossip().share, Gossip(staleness=1).share, Gossip(staleness=1, weight=0.375).share) == (0.5, 0.25, 0.375)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 40), st.sampled_from([0, 1]))
def test_gossip_of_rows_keeps_the_mean_and_a_row_sends_each_byte_once(within, rows, step, staleness):
    algorithm = Gossip(within=within, staleness=staleness)
    ranks = within * rows
    schedule = algorithm.schedule(step, ranks)
    prove(schedule, promise(algorithm, schedule))
    sent = [Fraction(0)] * rows
    for hop in schedule.steps():
        for src, dst, lo, hi in zip(*(column.tolist() for column in hop.columns[:4]), strict=True):
            if src // within != dst // within:
                sent[src // within] += Fraction(hi - lo, schedule.chunks)
    assert sent == [Fraction(rows > 1)] * rows


@for_each(
    ("make", "words"),
    [
        (lambda: Gossip("star"), "choose one of dissemination, hypercube"),
        (lambda: Gossip(payload="loss"), "choose one of weights, gradients"),
        (lambda: Gossip(staleness=2), "two diverge"),
        (lambda: Gossip(staleness=1, weight=0.5), "late messages with 1/2 oscillate for ever"),
        (lambda: Gossip(staleness=1, payload="gradients"), "belongs to weights that are gone"),
        (lambda: Gossip(weight=0.0), "must be above 0 and at most 1/2"),
        (lambda: Gossip(weight=0.6), "must be above 0 and at most 1/2"),
        (lambda: Gossip(within=0), "within=0: give a whole number from 1 on"),
        (lambda: Gossip("hypercube").schedule(0, 6), "use the topology 'dissemination'"),
        (lambda: Gossip(within=4).schedule(0, 6), "within=4 does not divide 6 ranks"),
    ],
)
def test_settings_and_rank_counts_that_cannot_work_are_refused_with_the_reason(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_round_is_what_the_paper_says():
    (step,) = dissemination(5, 1).steps()
    assert [*zip(step.src.tolist(), step.dst.tolist(), strict=True)] == [(0, 2), (1, 3), (2, 4), (3, 0), (4, 1)]
    (step,) = hypercube(4, 1).steps()
    assert [*zip(step.src.tolist(), step.dst.tolist(), strict=True)] == [(0, 2), (1, 3), (2, 0), (3, 1)]


@pytest.mark.parametrize("gossip", [Gossip(seed=3), Gossip("hypercube", seed=4), Gossip(within=4, seed=5)])
def test_all_schedules_rename_the_ranks_of_those_of_a_period(gossip):
    ranks = 16
    renamed = set()
    for step in range(3 * gossip.period(ranks)):
        schedule = gossip.schedule(step, ranks)
        before, order = schedule.renames
        renamed.add(before)
        assert before.over(order).digest() == schedule.digest()
        assert sorted(order) == list(range(ranks))
    assert len(renamed) == gossip.period(ranks)
    assert replace(schedule, steps=before.steps).renames is None
