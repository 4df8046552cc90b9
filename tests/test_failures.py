# SPDX-License-Identifier: Apache-2.0
"""``bench/failures.py``: how long training takes if something fails again and again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from failures_audit import _wrong, lineage, longest_gaps, lost_updates, units
from failures_plan import KINDS, Job, checkpoint_interval, draw
from failures_report import records_of, tables
from failures_runs import Run
from failures_worker import batch_of, fresh, images, prepare_images
from records import read

BENCH = Path(__file__).parent.parent / "bench"


def update(step, members, attempt=0, at_s=0.0):
    event = {"kind": "update", "step": step, "members": members, "attempt": attempt, "at_s": at_s}
    return {**event, "rank": members[0], "pid": 100 + members[0]}


def ready(step, attempt):
    return {"kind": "ready", "step": step, "attempt": attempt, "at_s": 0.0, "rank": 0, "pid": 100}


def test_a_seed_and_a_rate_always_have_the_same_failures():
    assert draw(3, 10, 100, 5) == draw(3, 10, 100, 5)
    assert draw(3, 10, 100, 5) != draw(4, 10, 100, 5)
    assert draw(3, None, 100, 5) == []


def test_failures_have_the_rate_and_all_kinds_and_victims():
    drawn = [draw(seed, 10, 1000, 5) for seed in range(20)]
    found = [failure for each in drawn for failure in each]
    assert [len(each) for each in drawn] == [100] * 20
    assert len(draw(0, 100, 50, 5)) == 1
    assert {failure.kind for failure in found} == {*KINDS}
    assert {failure.victim for failure in found} == {*range(5)}
    assert all(0 <= failure.step < 1000 for failure in found)
    assert all([failure.step for failure in each] == sorted(failure.step for failure in each) for each in drawn)


@pytest.mark.parametrize(
    ("checkpoint_s", "step_s", "every", "interval"),
    [(0.005, 0.1, 10, 1), (0.1, 0.1, 50, 10), (0.4, 0.1, 50, 20), (0.1, 0.1, None, 0)],
)
def test_checkpoints_lie_further_apart_the_more_they_cost_and_the_rarer_failures_are(
    checkpoint_s, step_s, every, interval
):
    assert checkpoint_interval(checkpoint_s, step_s, every) == interval


def test_a_restart_undoes_the_updates_since_the_checkpoint():
    first = [ready(0, 0), *(update(step, [0, 1]) for step in range(7))]
    second = [ready(4, 1), *(update(step, [0, 1], 1) for step in range(4, 6))]
    assert lost_updates([*first, *second]) == 3
    assert lost_updates([*first, ready(4, 1), *second, ready(6, 2)]) == 3  # the last one undoes nothing
    assert lost_updates([*first, *second, ready(4, 2)]) == 5


def test_samples_of_undone_updates_are_trained_twice():
    job = Job("ddp", "", ranks=2, steps=4, compute_s=0.0, seed=0, checkpoint_every=2)
    events = [update(0, [0, 1]), update(1, [0, 1]), update(2, [0, 1]), update(2, [0, 1], 1), update(3, [0, 1], 1)]
    assert units(events, job) == (8, 2)
    assert units(events[:2], job) == (4, 0)


def test_the_final_model_has_the_updates_of_the_latest_attempt():
    events = [update(0, [0, 1]), update(1, [0, 1]), update(1, [1, 2], 1), update(1, [1, 2], 1)]
    assert lineage(events) == {0: {(0, 1)}, 1: {(1, 2)}}


def test_a_failure_costs_the_longest_time_without_an_update_until_the_next_failure():
    events = [update(step, [0], at_s=at_s) for step, at_s in enumerate((1.0, 2.0, 5.0, 6.0, 10.0))]
    struck = [{"kind": "kill", "at_s": 2.5, "hit": True}, {"kind": "stop", "at_s": 5.5, "hit": True}]
    assert longest_gaps(events, struck, 10.0) == {"kill": [3.0], "stop": [4.0]}


@pytest.fixture
def finished(tmp_path):
    """A run of three ranks with one backup and two updates, of which the first one comes from ranks 0 and 2."""
    prepare_images(tmp_path)
    job = Job("backup1", str(tmp_path), ranks=3, steps=2, compute_s=0.0, seed=0, checkpoint_every=0)
    model, optimizer = fresh(job.seed)
    for step, members in enumerate([(0, 2), (0, 1)]):
        optimizer.zero_grad()
        x, y = batch_of(images(tmp_path)[0], job.seed, step, members, job.ranks)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "final-0.pt")
    return Run(job, [], events=[ready(0, 0), update(0, [0, 2]), update(1, [0, 1])])


def test_the_audit_finds_nothing_wrong_with_a_right_run(finished):
    assert list(_wrong(finished)) == []


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([update(0, [0, 2])], "not one for each of 2 steps"),
        ([update(0, [0, 2]), update(1, [0, 1]), update(1, [1, 2])], "not one set of 2 gradients"),
        ([update(0, [0, 2]), update(1, [0])], "not one set of 2 gradients"),
        ([update(0, [0, 1]), update(1, [0, 1])], "off by"),
    ],
    ids=["an update is lost", "an update is made twice", "a gradient is missing", "other gradients"],
)
def test_the_audit_finds_updates_that_are_wrong(finished, events, said):
    finished.events = events
    (complaint,) = _wrong(finished)
    assert said in complaint


def test_the_audit_finds_processes_with_different_weights(finished):
    weights = torch.load(Path(finished.job.folder) / "final-0.pt")
    next(iter(weights.values())).view(-1)[0] += 1e-12
    torch.save(weights, Path(finished.job.folder) / "final-1.pt")
    assert list(_wrong(finished)) == ["processes ended with different weights"]


def row(contender, every, seed, seconds):
    counts = dict.fromkeys(("updates_lost", "samples_twice", "samples_never", "restarted", "replaced", "hit"), seed)
    figures = {
        "failures": 3,
        "loss": 0.5,
        "joins_s": [0.4],
        "gaps_s": {"kill": [seconds]},
        "complaints": [],
        "errors": [],
    }
    return {"contender": contender, "every": every, "seed": seed, "seconds": seconds, **counts, **figures}


def test_a_ratio_is_to_the_median_time_without_failures():
    rows = [row("ddp", None, seed, 10.0 + seed) for seed in range(3)]
    rows += [row("ddp", 10, seed, ratio * 11.0) for seed, ratio in enumerate((3.0, 2.0, 4.0))]
    found = list(records_of(rows))
    assert [one["case"] for one in found] == ["without failures", "a failure every 10 steps"]
    assert (found[1]["ratio"], found[1]["ratio_low"], found[1]["ratio_high"]) == (3.0, 2.0, 4.0)
    assert "| DDP over Gloo, checkpoints | 11.0 | 3.00 (2.00 .. 4.00) |" in tables(found)
    loss = "0.50 (0.50 .. 0.50)"
    assert f"| DDP over Gloo, checkpoints | 3.00 | 1 | 1 | 1 | {loss} | {loss} | 1 | 1 | 1 |" in tables(found)


def test_the_pages_show_the_tables_of_the_records():
    ratios, details = tables(read([BENCH / "results" / "failures.jsonl"])).strip().split("\n\n")
    docs = BENCH.parent / "docs"
    assert ratios in (docs / "fault_tolerance.md").read_text(encoding="utf-8")
    assert details in (docs / "evidence.md").read_text(encoding="utf-8")


@pytest.mark.slow  # real processes
def test_training_under_failures_ends_and_loses_no_update():
    options = ["--steps", "12", "--rates", "4", "--seeds", "1", "--ranks", "3", "--contenders", "backup1", "--json"]
    command = [sys.executable, str(BENCH / "failures.py"), *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    without, failing = json.loads(done.stdout)["runs"]
    assert (without["failures"], without["replaced"], without["complaints"]) == (0, 0, [])
    assert failing["hit"] > 0
    assert (failing["updates_lost"], failing["complaints"]) == (0, [])
