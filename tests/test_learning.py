# SPDX-License-Identifier: Apache-2.0
"""What gossip does to learning on real images: the short form of the table in docs/evidence.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import learning

RANKS, STEPS = 8, 280


@pytest.fixture(scope="module")
def data():
    return learning.load()


@pytest.fixture(scope="module")
def found(data):
    return {rule: learning.simulated(rule, RANKS, 0, data, STEPS) for rule in learning.RULES}


@pytest.mark.parametrize("rule", ["gossip, weights", "gossip, weights, one step late"])
def test_gossip_of_weights_learns_as_all_reduce_does_and_keeps_replicas_together(found, rule):
    assert abs(found[rule].accuracy - found["all-reduce"].accuracy) < 0.015
    assert found[rule].disagreement < 0.01


def test_gossip_of_gradients_alone_lets_replicas_drift_apart_and_is_clearly_worse(found):
    outcome = found["gossip, gradients only"]
    assert outcome.accuracy < found["all-reduce"].accuracy - 0.03
    assert outcome.disagreement > 0.3
    assert outcome.accuracy > found["no communication"].accuracy


@pytest.mark.parametrize("rule", learning.RULES)
def test_the_runtime_learns_what_the_simulation_says(data, rule):
    real, simulated = (run(rule, 3, 1, data, 30) for run in (learning.trained, learning.simulated))
    assert real.accuracy == pytest.approx(simulated.accuracy, abs=0.003)
    assert real.disagreement == pytest.approx(simulated.disagreement, rel=0.02, abs=1e-5)
