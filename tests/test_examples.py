# SPDX-License-Identifier: Apache-2.0
"""The programs that people start from."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commrt.testing.processes import free_port

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


def test_the_imagenet_example_goes_on_without_a_rank_that_dies(tmp_path):
    folder_of_images(tmp_path / "images")
    options = "--blocks 1,1 --width 8 --side 32 --loaders 0 --batch 8 --warmup 1 --algorithm backup --backups 1"
    command = [sys.executable, EXAMPLES / "imagenet_resnet50.py", *options.split(), "--data", tmp_path / "images"]
    variables = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    crew = [
        subprocess.Popen(
            [*command, "--epochs", "3", "--checkpoint", tmp_path / "last.pt"],
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "COMMRT_TIMEOUT_S": "20"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert crew[0].stdout.readline().startswith("epoch 1:")
        crew[2].kill()
        said, _ = crew[0].communicate(timeout=100)
        assert [process.wait(timeout=100) for process in crew] == [0, 0, -signal.SIGKILL]
    finally:
        for process in crew:
            process.kill()
            process.stdout.close()
    assert re.findall(r"epoch (\d+):", said) == ["2", "3"]
    assert (tmp_path / "last.pt").exists()


def test_the_imagenet_example_names_a_class_without_test_images(tmp_path):
    folder_of_images(tmp_path / "images")
    shutil.rmtree(next((tmp_path / "images" / "val").iterdir()))
    command = [sys.executable, EXAMPLES / "imagenet_resnet50.py", "--data", tmp_path / "images"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.search(r"class \w+ is in one of train and val only", done.stderr)
