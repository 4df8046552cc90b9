# SPDX-License-Identifier: Apache-2.0
"""What gossip does to learning on real images, and how far it lets ranks drift: short forms of README.md."""

from __future__ import annotations

from functools import cache

import gossip_learning
import gossip_noise
import pytest
from cases import for_each
from mnist_images import load

RANKS, STEPS = 8, 280


@pytest.fixture(scope="module")
def data():
    return load()


@pytest.fixture(scope="module")
def found(data):
    """Return what a rule leads to; each rule is simulated once, when a test asks for it."""
    return cache(lambda rule: gossip_learning.simulated(rule, RANKS, 0, data, STEPS))


@pytest.mark.slow
@for_each("rule", ["gossip, weights", "gossip, weights, one step late"])
def test_gossip_of_weights_learns_as_all_reduce_does_and_keeps_replicas_together(found, rule):
    assert abs(found(rule).accuracy - found("all-reduce").accuracy) < 0.015
    assert found(rule).disagreement < 0.01


@pytest.mark.slow
def test_gossip_of_gradients_alone_lets_replicas_drift_apart_and_is_clearly_worse(found):
    outcome = found("gossip, gradients only")
    assert outcome.accuracy < found("all-reduce").accuracy - 0.03
    assert outcome.disagreement > 0.3
    assert outcome.accuracy > found("no communication").accuracy


@for_each("rule", gossip_learning.RULES)
def test_the_runtime_learns_what_the_simulation_says(data, rule):
    real, simulated = (run(rule, 3, 1, data, 30) for run in (gossip_learning.trained, gossip_learning.simulated))
    assert real.accuracy == pytest.approx(simulated.accuracy, abs=0.003)
    assert real.disagreement == pytest.approx(simulated.disagreement, rel=0.02, abs=1e-5)


SETTLED = {
    2: (0.0, None, 0.0107, 0.0083, 0.0098, None, 0.0171, 0.0121),
    8: (0.0075, 0.0202, 0.0145, 0.0139, 0.0178, 0.0295, 0.0182, 0.0196),
    32: (0.0092, 0.0216, 0.0160, 0.0156, 0.0198, 0.0295, 0.0199, 0.0217),
    64: (0.0095, 0.0219, 0.0163, 0.0158, 0.0201, 0.0299, 0.0202, 0.0220),
}
"""Ranks to their distances, case by case; None where two ranks swing, or fly apart."""


@for_each("ranks", SETTLED)
def test_ranks_settle_as_far_apart_as_theory_says(ranks):
    for (late, weight), expected in zip(gossip_noise.CASES, SETTLED[ranks], strict=True):
        found = gossip_noise.distance(ranks, late, weight, dimensions=100)
        if expected is None:
            assert found > 0.03
        else:
            assert found == pytest.approx(expected, rel=0.06, abs=1e-9)


def test_two_ranks_with_messages_two_steps_late_fly_apart():
    assert gossip_noise.distance(2, 2, 0.375, dimensions=20) > 1e6


@pytest.mark.slow
def test_samples_passed_round_let_a_rank_of_one_class_see_the_others(data):
    outcome = gossip_learning.trained("gossip, weights", 4, 0, data, 100, sorted_by_class=True, ring=True)
    assert outcome.accuracy > 0.8
