# SPDX-License-Identifier: Apache-2.0
"""The command as a user calls it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commrt.cli import train
from commrt.cli.app import app
from commrt.errors import CommrtError
from commrt.testing.processes import free_port

COMMAND = Path(sys.executable).with_name("commrt")
RANKS = [*range(1, 65), 97]


def invoke(*args):
    return CliRunner().invoke(app, args)


def command(*args, env=None):
    return subprocess.run([COMMAND, *args], capture_output=True, text=True, timeout=110, check=False, env=env)


def verified(*args):
    result = invoke("verify", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "torus2d"])
def test_verify_proves_every_rank_count(algorithm):
    for ranks in RANKS:
        record = verified(algorithm, "--ranks", str(ranks))
        assert record["ok"]
        assert record["counterexample"] is None


@pytest.mark.parametrize(("x", "y"), [(1, 1), (4, 4), (4, 3), (3, 4), (12, 1), (1, 12), (32, 32), (7, 5)])
def test_verify_reports_the_cost_of_a_grid(x, y):
    record = verified("torus2d", "--ranks", str(x * y), "--grid", f"{x}x{y}")
    assert record["steps"] == 2 * (x - 1) + 2 * (y - 1)
    assert record["bytes_per_rank"] == 2 * (x * y - 1) / (x * y)


def test_verify_can_show_the_schedule():
    assert "0  add  0->1 [2:4)" in invoke("verify", "torus2d", "--show").stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("verify", "tree"), "no algorithm is called 'tree': choose one of halving_doubling, ring, torus2d"),
        (("verify", "torus2d", "--grid", "3x3"), "does not fit 4 ranks"),
        (("verify", "torus2d", "--grid", "3by3"), "write it as 4x3"),
        (("verify", "ring", "--both-ways"), "are for torus2d, not for ring"),
        (("train", "--workers", "0"), "--workers 0: at least one worker"),
        (("train", "--algorithm", "nccl"), "choose one of ddp, halving_doubling, ring, torus2d"),
        (("train", "--compare", "nccl"), "choose one of ddp, halving_doubling, ring, torus2d"),
        (("train", "--batch-size", "3"), "--batch-size 3 must give each of 4 workers an image"),
        (("train", "--batch-size", "4001"), "there are 4000 to train on"),
        (("train", "--timeout-s", "0"), "--timeout-s 0.0 must be a positive number"),
        (("train", "--timeout-s", "inf"), "--timeout-s inf must be"),
        (("train", "--bucket-cap-mb", "nan"), "--bucket-cap-mb nan must be"),
        (("train", "--lr", "inf"), "--lr inf must be a number"),
        (("train", "--seed", "-1"), "--seed -1 must be between 0"),
        (("train", "--seed", str(2**63)), "must be between 0"),
        (("verify", "torus2d", "--grid", "0x4"), "a grid of 0 x 4 does not fit 4 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_sentence(args, says):
    with pytest.raises(CommrtError, match=says):
        CliRunner().invoke(app, args, catch_exceptions=False)


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "tree"),
        ("verify", "ring", "--ranks", "0"),
        ("verify", "torus2d", "--grid", "3x3"),
        ("train", "--workers", "0"),
        ("train", "--lr", "nan"),
    ],
)
def test_bad_input_ends_with_code_2_and_no_traceback(args):
    result = command(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_verify_needs_no_torch():
    call = "from commrt.cli.app import app; app(['verify', 'ring'], standalone_mode=False)"
    script = f"import sys; {call}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("False\n")


def test_doctor_finds_nothing_wrong_here_and_says_what_would_be(monkeypatch):
    record = json.loads(invoke("doctor", "--json").stdout)
    assert record["ok"]
    assert {"python", "torch", "cupy", "launcher", "gpu", "exchange"} <= {
        finding["name"] for finding in record["findings"]
    }
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    monkeypatch.setenv("RANK", "0")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "unset it" in result.output
    assert "WORLD_SIZE" in result.output


@pytest.mark.processes
def test_train_learns_on_real_images_and_prints_one_object():
    result = command("train", "--workers", "2", "--epochs", "1", "--wire", "bf16", "--compare", "ddp", "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["workers"], record["wire"]) == ("torus2d", 2, "bf16")
    assert record["test_accuracy"] > 0.7
    assert record["replicas_equal"] is True
    assert 0 < record["exposed_comm_seconds"] < record["step_seconds"]
    assert record["bytes_sent_per_step"] == pytest.approx(120_382 * 2, rel=0.01)
    assert [other["algorithm"] for other in record["compared"]] == ["ddp"]
    assert record["compared"][0]["test_accuracy"] == pytest.approx(record["test_accuracy"], abs=0.05)


@pytest.mark.processes
def test_train_runs_under_torchrun():
    torchrun = Path(sys.executable).with_name("torchrun")
    launch = [torchrun, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", COMMAND]
    args = ["train", "--epochs", "1", "--algorithm", "ring", "--json"]
    result = subprocess.run([*launch, *args], capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["workers"], record["replicas_equal"]) == (2, True)


@pytest.mark.processes
@pytest.mark.parametrize("variables", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_train_compares_with_ddp_under_any_launcher(variables):
    rank_name, size_name = variables
    port = str(free_port())
    base = dict(os.environ) | {size_name: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    call = [COMMAND, "train", "--epochs", "1", "--compare", "ddp", "--compare", "ring", "--json"]
    ranks = [
        subprocess.Popen(call, env=base | {rank_name: str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=110) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    record = json.loads(outputs[0][0])
    assert outputs[1][0] == b""
    assert [other["algorithm"] for other in record["compared"]] == ["ddp", "ring"]
    assert all(one["replicas_equal"] for one in (record, *record["compared"]))


@pytest.mark.processes
def test_ctrl_c_ends_the_command_and_its_workers_without_a_traceback():
    ours, theirs = pty.openpty()  # a progress bar moves on terminals only
    call = [COMMAND, "train", "--workers", "2", "--epochs", "10000"]
    process = subprocess.Popen(call, stderr=theirs, stdout=theirs, start_new_session=True)
    os.close(theirs)
    shown = ""
    try:
        while "loss 0" not in shown:
            shown += os.read(ours, 4096).decode(errors="replace")
        os.killpg(process.pid, signal.SIGINT)
        with suppress(OSError):  # how a terminal ends
            while more := os.read(ours, 4096):
                shown += more.decode(errors="replace")
        assert process.wait(timeout=60) == 130, shown
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
    assert "Traceback" not in shown


def test_what_a_worker_said_is_told_as_a_sentence():
    written = {"message": "UsageError: too little. ", "extraInfo": {"py_callstack": "Traceback ..."}}
    assert train._sentence(written) == "UsageError: too little"
    assert train._sentence("Signal 9 (SIGKILL) received by PID 1") == "Signal 9 (SIGKILL) received by PID 1"
