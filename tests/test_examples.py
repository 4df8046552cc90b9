# SPDX-License-Identifier: Apache-2.0
"""The programs that people start from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.processes
def test_the_gossip_example_learns_under_torchrun():
    torchrun = Path(sys.executable).with_name("torchrun")
    launch = [torchrun, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", EXAMPLES / "gossip.py"]
    done = subprocess.run([*launch, "--passes", "2"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.match(r"2 ranks: ([0-9.]+)% of 1,000 test images, replicas were apart by ", done.stdout)
    assert float(accuracy[1]) > 75


def folder_of_images(root, size=36):
    """Three classes, told by their colour."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 32), ("val", 8)):
        for colour in range(3):
            (root / part / f"class{colour}").mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (size, size + 8, 3))
                pixels[..., colour] += 120
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / f"class{colour}" / f"{number}.png")


@pytest.mark.processes
def test_the_imagenet_example_trains_with_the_whole_recipe_and_goes_on_from_its_checkpoint(tmp_path):
    folder_of_images(tmp_path / "images")
    torchrun = Path(sys.executable).with_name("torchrun")
    example = EXAMPLES / "imagenet_resnet50.py"
    launch = [torchrun, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", example]
    network = "--blocks 1,1 --width 8 --side 32 --loaders 0"
    recipe = (
        "--batch 8 --grow 1:16 --most 8 --warmup 1 --statistics 24 --algorithm backup --backups 0 --lars --lr 5 "
        "--wire fp16 --amp bf16 --smoothing 0.1"
    )
    paths = ["--data", tmp_path / "images", "--checkpoint", tmp_path / "last.pt"]

    def epochs(count):
        command = [*launch, *network.split(), *recipe.split(), *paths, "--epochs", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
        return re.findall(r"epoch (\d+): ([0-9.]+)% right, [0-9,]+ images/s, (\d+) updates", done.stdout)

    assert [(epoch, updates) for epoch, _, updates in epochs(2)] == [("1", "6"), ("2", "9")]
    (resumed,) = epochs(3)
    assert (resumed[0], resumed[2]) == ("3", "12")
    assert float(resumed[1]) > 60
