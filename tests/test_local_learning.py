# SPDX-License-Identifier: Apache-2.0
"""What bench/local_learning.py measures with: its settings, each trained for a few steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import local_learning


@pytest.mark.parametrize("case", local_learning.cases(), ids=lambda case: case.name)
def test_each_setting_trains_and_can_be_repeated(case):
    first, again = (local_learning.trained(case, 0, steps=5, ranks=2) for _ in range(2))
    assert torch.equal(first.weights, again.weights)
    assert first.loss < 2.5


def test_settings_have_names_of_their_own():
    names = [case.name for case in local_learning.cases()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("feed", local_learning.FEEDS)
def test_a_pass_gives_each_image_once(feed):
    steps = 4000 // 16 // 2
    batches = [pixels for pixels, _ in local_learning.FEEDS[feed](0, steps, 2)]
    assert len(batches) == steps
    assert torch.cat(batches, 1).flatten(2).sum(2).flatten().unique().numel() > 3900
