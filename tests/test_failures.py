# SPDX-License-Identifier: Apache-2.0
"""``bench/failures.py``: how long training takes if something fails again and again, and whether an update is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from failures import tables
from failures_audit import lost_updates, units, wrong
from failures_runs import Run
from failures_worker import TRAIN_IMAGES, Job, batch_of, fresh, images
from records import read

ROOT = Path(__file__).parent.parent


def update(step, members, attempt=0):
    return {"kind": "update", "step": step, "members": members, "attempt": attempt, "rank": members[0], "pid": 1}


def test_a_restart_undoes_the_updates_since_the_checkpoint_and_their_samples_count_twice():
    first, second = ([{"kind": "ready", "step": step, "attempt": attempt}] for step, attempt in ((0, 0), (4, 1)))
    first += [update(step, [0, 1]) for step in range(7)]
    second += [update(step, [0, 1], attempt=1) for step in range(4, 8)]
    assert lost_updates([*first, *second]) == 3
    assert units([*first, *second], Job("ddp", "", 2, 8, 0.0, 0, 4)) == (16, 6)


@pytest.fixture
def finished(tmp_path):
    """A run of three ranks with one backup and two updates, of which the first one comes from ranks 0 and 2."""
    noise, digits = torch.randn(TRAIN_IMAGES, 1, 28, 28, dtype=torch.float64), torch.arange(TRAIN_IMAGES) % 10
    torch.save([noise, digits, noise[:1], digits[:1]], tmp_path / "images.pt")
    job = Job("backup1", str(tmp_path), ranks=3, steps=2, compute_s=0.0, seed=0, checkpoint_every=0)
    model, optimizer = fresh(job.seed)
    for step, members in enumerate([(0, 2), (0, 1)]):
        optimizer.zero_grad()
        x, y = batch_of(images(tmp_path)[0], job.seed, step, members, job.ranks)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "final-0.pt")
    return Run(job, [])


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([update(0, [0, 2]), update(1, [0, 1])], None),
        ([update(0, [0, 2])], "not one for each of 2 steps"),
        ([update(0, [0, 2]), update(1, [0, 1]), update(1, [1, 2])], "not one set of 2 gradients"),
        ([update(0, [0, 2]), update(1, [0])], "not one set of 2 gradients"),
        ([update(0, [0, 1]), update(1, [0, 1])], "off by"),
    ],
    ids=["right", "an update is lost", "an update is made twice", "a gradient is missing", "other gradients"],
)
def test_the_audit_finds_updates_that_are_wrong(finished, events, said):
    finished.events = events
    complaints = list(wrong(finished))
    assert len(complaints) == (said is not None)
    assert said is None or said in complaints[0]


def test_the_pages_show_the_tables_of_the_records():
    ratios, details = tables(read([ROOT / "bench" / "results" / "failures.jsonl"])).split("\n\n")
    assert ratios in (ROOT / "docs" / "fault_tolerance.md").read_text(encoding="utf-8")
    assert details in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


@pytest.mark.slow  # real processes
@pytest.mark.timeout(600)  # on a busy machine
def test_training_under_failures_ends_and_loses_no_update(tmp_path):
    kept = tmp_path / "records.jsonl"
    options = ["--steps", "12", "--rates", "4", "--seeds", "1", "--ranks", "3", "--contenders", "backup1"]
    command = [sys.executable, str(ROOT / "bench" / "failures.py"), *options, "--records", str(kept)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    without, failing = map(json.loads, kept.read_text().splitlines())
    assert (without["failures"], without["replaced"], without["complaints"]) == (0, 0, 0)
    assert failing["hit"] > 0
    assert (failing["updates_lost"], failing["complaints"]) == (0, 0)
