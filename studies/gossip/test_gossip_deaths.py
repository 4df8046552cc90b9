# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, and ranks that sleep for random times, in short runs of real processes."""

from __future__ import annotations

import gossip_deaths
import gossip_jitter
import gossip_learning
import pytest
from mnist_images import load

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_a_death_costs_little_accuracy():
    steps = 240
    alive = gossip_learning.simulated("gossip, weights", gossip_deaths.RANKS, 0, load(), steps)
    struck = gossip_deaths.trained("gossip", 0, steps, kills=True)
    assert struck.lost[0].startswith("rank 3 is lost, as the others noticed in step ")
    assert struck.accuracy > alive.accuracy - 0.02  # a standard error on 1,000 images is 0.008


def test_workers_that_sleep_take_at_least_as_long_as_they_sleep():
    for mode in gossip_jitter.MODES:
        assert 0 < gossip_jitter.efficiency(mode, workers=2, steps=10, mean_s=0.05, variation=0.1, seed=0) <= 1.0
