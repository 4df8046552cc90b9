# SPDX-License-Identifier: Apache-2.0
"""The command as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import for_each
from commands import ended, invoke, told
from typer.testing import CliRunner

import commrt
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.errors import CommrtError
from commrt.tools.commands.app import app

COMMAND = Path(sys.executable).with_name("commrt")
RANKS = (*range(1, 10), 12, 13, 16, 31)


def verified(*args):
    return told("verify", *args)


def test_verify_proves_all_reduces_of_any_number_of_ranks():
    records = {(name, ranks): verified(name, "--ranks", str(ranks)) for name in ALGORITHMS for ranks in RANKS}
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
    (("verify", "torus2d", "--grid", "3x3"), "does not fit 4 ranks"),
    (("verify", "torus2d", "--grid", "3by3"), "write it as 4x3"),
    (("verify", "ring", "--both-ways"), "are for torus2d, not for ring"),
    (("verify", "local", "--grid", "2x2"), "--grid and --both-ways are for torus2d, not for local"),
    (("verify", "direct", "--within", "3"), "4 ranks do not fill hosts of within=3"),
    (
        ("verify", "torus2d", "--within", "2"),
        "--within is for gossip, direct, rings and double_tree, not for torus2d",
    ),
    (("verify", "torus2d", "--grid", "0x4"), "0 x 4 does not fit 4 ranks"),
]


@for_each(("args", "says"), BAD)
def test_bad_input_is_one_sentence(args, says):
    with pytest.raises(CommrtError, match=says):
        CliRunner().invoke(app, args, catch_exceptions=False)


BAD_LINES = [
    *["verify tree", "verify ring --ranks 0", "verify ring --ranks 1000000", "verify ring --ranks four", "verify"],
    *["verify torus2d --grid 3x3", "simulate exchange gossip"],
    *["plan backups --backups many --model resnet50 --wire bf16", "simulate gossip --nbytes 1", "plan"],
    "train --workers 2",
]


@for_each("line", BAD_LINES)
def test_bad_input_ends_with_code_2_and_no_traceback_and_no_json(line):
    code, out, err = ended(*line.split(), "--json")
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert err.strip()


@pytest.mark.slow
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
    shown, *lines = re.split(r"─ (Prove, price and draw|Look at a machine) ─", result.output)
    groups = {
        title: re.findall(r"^│ (\w+) ", text, re.MULTILINE) for title, text in zip(*[iter(lines)] * 2, strict=True)
    }
    assert groups == {
        "Prove, price and draw": ["verify", "simulate", "plan", "draw"],
        "Look at a machine": ["probe", "doctor"],
    }
    assert "0 success, 1 runtime failure, 2 invalid input, 130 interrupted" in shown
    assert len(result.output.splitlines()) <= 30


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("simulate", ["exchange", "step", "local", "backups"]),
        ("plan", ["exchange", "step", "backups", "collective"]),
        ("draw", ["schedule", "step", "scaling", "recorded"]),
    ],
)
def test_help_of_a_group_lists_its_commands(group, names):
    result = CliRunner().invoke(app, [group, "--help"], env={"COLUMNS": "100"})
    assert re.findall(r"^│ (\w+) ", result.output, re.MULTILINE) == names


def test_proving_and_pricing_need_no_torch():
    step = ["--model", "resnet50", "--wire", "bf16", "--steps", "50"]
    lines = ["verify", "ring"], ["simulate", "backups", "--steps", "50"], ["plan", "backups", *step]
    calls = "; ".join(f"app({line}, standalone_mode=False)" for line in lines)
    script = f"import sys; from commrt.tools.commands.app import app; {calls}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("False\n")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # nothing that is forked here computes
def test_doctor_finds_nothing_wrong_here_and_says_what_would_be(monkeypatch):
    record = json.loads(invoke("doctor", "--json").stdout)
    assert record["ok"]
    assert {"python", "torch", "cupy", "launcher", "timeouts", "gpu", "exchange"} <= {
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
