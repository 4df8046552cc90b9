# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and the checks made for a GPU run everywhere, without a GPU on plain torch; pages say what they found.

``bench/failures.py`` tells how long training takes if something fails again and again, and whether an update is lost.
"""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import records
import report
import torch
import torch.distributed as dist
from failures import tables
from failures_audit import wrong
from failures_runs import Run
from failures_worker import TRAIN_IMAGES, Job, batch_of, fresh, images
from forked_commands import printed
from sources import ROOT

BENCH = ROOT / "bench"


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_the_benchmarks_of_the_kernels_run():
    files = {"test_on_gpu.py": "not codes or int4", "test_kernels.py": "GoogLeNet and mix and bf16 or reduce and not 3"}
    chosen = " or ".join(f"{name} and ({tests})" for name, tests in files.items())
    options = ["-p", "no:cacheprovider", "--benchmark-disable", "-k", chosen]
    said = printed(sys.executable, "-m", "pytest", *(BENCH / name for name in files), *options, TRITON_INTERPRET="0")
    assert all(re.search(rf"{name} [s.]*\.", said) for name in files), said


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_the_check_of_a_gpu_writes_one_record(tmp_path):
    printed(sys.executable, BENCH / "gpu_check.py", "correctness", "--only", "can two", "--out", tmp_path)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    (stage,) = record["stages"]
    assert (record["device"], stage["passed"], stage["failed"], stage["trouble"]) == ("CPU", 1, [], None)
    assert len(stage["figures"][0]["seconds per exchange of 1 MiB"][0]) == 10


@pytest.fixture(scope="module")
def recorded():
    found = records.read(sorted((BENCH / "results").glob("*.jsonl")))
    return {(one["suite"], one["case"], one["variant"]): one for one in found}


def ratio(recorded, suite, variant):
    """The recorded ratio of a step to DDP's, or of an exchange between hosts to Gloo's, as pages print it."""
    case, peer = {"step": ("4 processes", "ddp"), "netlab": ("exchange", "Gloo all_reduce, fp32")}[suite]
    one = recorded[suite, case, variant]
    assert one["peer"] == peer
    return f"{one['ratio']:.2f}"


def test_the_page_of_benchmarks_is_that_of_the_records(recorded):
    found = list(recorded.values())
    drawn = [suite for suite, _ in report.sections(found) if suite in report.PICTURED]
    assert (ROOT / "docs" / "benchmarks.md").read_text() == report.document(found, drawn)


CHOICES = {  # rows of the page of choices: the suite, and the variants in the order of their figures
    "`Torus2D()`, `Ring()`, `HalvingDoubling()`": ("step", ["torus2d fp32", "ring fp32", "halving_doubling fp32"]),
    '`Torus2D()` with `gradients="views"`': ("step", ["torus2d views"]),
    '`init_process_group("commrt")`': ("step", ["ddp, backend commrt"]),
    "`Direct(within=2)`, `wire=Int4()`": ("netlab", ["direct within, int4 + feedback"]),
    "`Gossip()`, `Gossip(within=2)`": ("netlab", ["gossip, fp32", "hierarchical gossip, fp32"]),
}


def test_the_page_of_choices_says_what_was_recorded(recorded):
    for start, (suite, variants) in CHOICES.items():
        row = re.search(rf" \| {re.escape(start)} \| (.*?) of ", (ROOT / "docs" / "algorithms.md").read_text())
        assert re.findall(r"\d\.\d\d", row[1]) == [ratio(recorded, suite, variant) for variant in variants], start


def test_the_page_of_all_reduces_says_what_was_recorded(recorded):
    page = (ROOT / "docs" / "algorithms" / "all_reduce.md").read_text()
    for name, said in {"ring": "ring", "halving_doubling": "halving-doubling", "torus2d": "2D torus"}.items():
        step = [ratio(recorded, "step", f"{name} {wire}") for wire in ("fp32", "bf16")]
        exchange = [ratio(recorded, "netlab", f"{name}, {wire}") for wire in ("fp32", "bf16")]
        assert f"| {said} | {', '.join(step)} | {', '.join(exchange)} | " in page


def test_the_audit_finds_updates_that_are_wrong(tmp_path):
    """Of two updates of three ranks with one backup, the first one comes from ranks 0 and 2, and says 0 and 1."""
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
    said = {"kind": "update", "members": [0, 1], "attempt": 0, "rank": 0, "pid": 1}
    (complaint,) = wrong(Run(job, [], events=[said | {"step": step} for step in range(2)]))
    assert "off by" in complaint
    events = [said | {"step": 0, "members": [0, 2]}, said | {"step": 1}]
    again = said | {"step": 1, "members": [0], "attempt": 1}  # of fewer ranks, in a later turn
    job = replace(job, contender="ddp-reconfigure")  # takes the gradients of all ranks that are there
    assert [*wrong(Run(job, [], events=events))] == []
    (complaint,) = wrong(Run(job, [], events=[*events, again]))
    assert "off by" in complaint


def test_the_pages_show_the_tables_of_the_records():
    ratios, details = tables(records.read([BENCH / "results" / "failures.jsonl"])).split("\n\n")
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert ratios in page
    assert details in page


@pytest.mark.slow  # real processes
@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.parametrize("contender", ["backup1", "ddp-reconfigure", "ddp-reconfigure-gloo"])
def test_training_under_failures_ends_and_loses_no_update(tmp_path, contender):
    if "reconfigure" in contender and not hasattr(dist, "_reconfigure"):
        pytest.skip("torch 2.14 or later")
    kept = tmp_path / "records.jsonl"
    options = ["--steps", "12", "--rates", "4", "--seeds", "1", "--ranks", "3", "--contenders", contender]
    path = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
    printed(sys.executable, BENCH / "failures.py", *options, "--records", kept, PYTHONPATH=path)
    without, failing = map(json.loads, kept.read_text().splitlines())
    assert (without["failures"], without["replaced"], without["complaints"]) == (0, 0, 0)
    assert failing["hit"] > 0
    assert (failing["updates_lost"], failing["complaints"]) == (0, 0)
