# SPDX-License-Identifier: Apache-2.0
"""The programs that people start from."""

import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import program
from PIL import Image

from commrt.testing.processes import run_processes

EXAMPLES = Path(__file__).parent.parent / "examples"


def ran(name, options, ranks):
    return run_processes(ranks, program, EXAMPLES / name, options.split(), limit_s=110)


def said(name, options, ranks):
    """What each rank printed, where all end well."""
    outcomes = ran(name, options, ranks)
    assert [outcome.error for outcome in outcomes] == [None] * ranks
    return [outcome.value for outcome in outcomes]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options", "least", "said_too"),
    [
        ("custom_loop.py", "--epochs 1", 70, ""),
        ("gossip.py", "--passes 2", 75, "replicas were apart by "),
        ("keep_ddp.py", "--passes 1 --algorithm halving_doubling --bf16", 80, "2 ranks, 125 steps: "),
    ],
)
def test_two_ranks_learn_and_the_first_one_says_how_well(name, options, least, said_too):
    first, second = said(name, options, ranks=2)
    assert float(re.search(r"([0-9.]+)% of 1,000 test images", first)[1]) > least
    assert said_too in first
    assert second == ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("torus2d --wire bf16", 2),  # the one example that `make test` runs
        pytest.param("gossip", 2, marks=pytest.mark.slow),
        pytest.param("backup", 3, marks=pytest.mark.slow),
        pytest.param("local --period 4 --delay 1", 2, marks=pytest.mark.slow),
    ],
)
def test_the_language_model_comes_to_know_more_than_how_frequent_letters_are(options, ranks):
    small = "--steps 60 --batch 8 --length 32 --width 64 --layers 2 --lr 5e-3 --write 5"
    first, *others = said("char_gpt.py", f"--algorithm {options} {small}", ranks)
    result, written = first.split("\n\n", maxsplit=1)
    assert float(re.search(r"([0-9.]+) nats per letter", result)[1]) < 3.25 - 0.1  # 3.25: of how frequent each is
    assert len(written) == len("5 new") + len("\n")
    assert others == [""] * (ranks - 1)


@pytest.mark.slow
@pytest.mark.processes
def test_a_schedule_of_ones_own_is_proven_priced_drawn_run_and_trained_with(tmp_path):
    first, *_ = said("own_schedule.py", f"--steps 20 --draw {tmp_path / 'swing.svg'}", ranks=4)
    steps = dict(re.findall(r"(\d+) ranks: proven; (\d+) steps", first))
    assert steps == {"2": "2", "4": "4", "8": "6", "16": "8", "64": "12"}
    assert len(re.findall(r"MB: ring [0-9.]+ ms, halving-doubling [0-9.]+ ms, swing [0-9.]+ ms", first)) == 3
    assert "4 ranks: ran, and every element is the sum" in first
    assert "replicas bitwise equal: True" in first
    assert "</svg>" in (tmp_path / "swing.svg").read_text()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(330)  # three launches
def test_a_run_that_is_killed_and_resumed_ends_with_bitwise_the_weights_of_an_unbroken_one(tmp_path):
    """By gossip, whose ranks have weights of their own; the training script resumes with a torus, see below."""

    def weights(folder, more):
        options = f"--algorithm gossip --steps 12 --folder {tmp_path / folder} {more}"
        return ran("checkpoint_resume.py", options, 3)

    unbroken = [outcome.value for outcome in weights("never", "--every 100")]
    killed = weights("some", "--every 5 --die-at 8")
    assert killed[0].value is None
    assert -signal.SIGKILL in {outcome.exit_code for outcome in killed}
    resumed = [outcome.value for outcome in weights("some", "--every 5")]
    assert resumed == [f"rank {rank}: goes on after step 5\n{value}" for rank, value in enumerate(unbroken)]
    assert len({value.split("weights ")[1] for value in unbroken}) == 3


@pytest.mark.slow
@pytest.mark.processes
def test_the_training_script_resumes_and_ends_with_the_loss_of_an_unbroken_run(tmp_path):
    runs = [("never", 12), ("some", 5), ("some", 12)]
    options = (f"--folder {tmp_path / folder} --steps {steps} --every 5" for folder, steps in runs)
    unbroken, begun, resumed = (said("training_script.py", each, ranks=2)[0] for each in options)
    assert resumed == unbroken.replace(begun, "rank 0 goes on after step 5\n")
    losses = [float(loss) for loss in re.findall(r"step (?:5|10|12): ([0-9.]+) nats per byte\n", unbroken)]
    assert 5 > losses[0] > losses[1] > losses[2]


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


@pytest.mark.slow
@pytest.mark.processes
def test_the_imagenet_example_trains_with_the_whole_recipe_and_goes_on_from_its_checkpoint(tmp_path):
    folder_of_images(tmp_path / "images")
    network = "--blocks 1,1 --width 8 --side 32 --loaders 0 --wire fp16 --amp bf16 --smoothing 0.1"
    recipe = "--batch 8 --grow 1:16 --most 8 --warmup 1 --statistics 24 --algorithm backup --backups 0 --lars --lr 5"
    paths = f"--data {tmp_path / 'images'} --checkpoint {tmp_path / 'last.pt'}"

    def epochs(count):
        first, _ = said("imagenet_resnet50.py", f"{network} {recipe} {paths} --epochs {count}", ranks=2)
        return re.findall(r"epoch (\d+): ([0-9.]+)% right, [0-9,]+ images/s, (\d+) updates", first)

    assert [(epoch, updates) for epoch, _, updates in epochs(2)] == [("1", "6"), ("2", "9")]
    (resumed,) = epochs(3)
    assert (resumed[0], resumed[2]) == ("3", "12")
    assert float(resumed[1]) > 60


def test_the_imagenet_example_names_a_class_without_test_images(tmp_path, monkeypatch):
    folder_of_images(tmp_path / "images")
    shutil.rmtree(next((tmp_path / "images" / "val").iterdir()))
    monkeypatch.setattr(sys, "argv", ["imagenet_resnet50.py", "--data", str(tmp_path / "images")])
    with pytest.raises(SystemExit, match=r"class \w+ is in one of train and val only"):
        runpy.run_path(str(EXAMPLES / "imagenet_resnet50.py"), run_name="__main__")
