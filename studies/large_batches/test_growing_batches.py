# SPDX-License-Identifier: Apache-2.0
"""growing_batches.py on few images: how many updates each way makes, and what its runs hold."""

from __future__ import annotations

import growing_batches
import pytest
from cases import for_each
from mnist_images import Images, load

UPDATES = {"32": 16 * 12, "32, then 512": 16 * 4 + 8, "512": 12}
"""Of 512 images in 12 epochs."""


@pytest.mark.slow
@for_each("way", growing_batches.WAYS)
def test_each_way_makes_the_updates_that_its_batches_allow(way):
    few = tuple(Images(*(part[:count] for part in images)) for images, count in zip(load(), (512, 64), strict=True))
    run = growing_batches.trained(way, 0, few, smoothing=0.1)
    assert run.updates[-1] == UPDATES[way]
    assert run.updates == sorted(run.updates)
    assert len(run.accuracy) == growing_batches.EPOCHS
    assert way == "512" or run.accuracy[-1] > 0.3  # 12 updates teach little


def test_a_picture_has_a_line_for_each_way(tmp_path):
    runs = [growing_batches.Run(way, 0, [1, 2], [0.8, 0.9]) for way in growing_batches.WAYS]
    growing_batches.draw(runs, str(tmp_path / "growing.svg"))
    assert "svg" in (tmp_path / "growing.svg").read_text()[:200]
