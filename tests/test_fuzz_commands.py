# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed after ``commrt``: it works, or it is refused with exit code 2 and one line."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path

import pytest
from cases import for_each
from fuzzed_lines import (
    ALGORITHM,
    COUNT,
    FILE,
    LOCAL,
    MANY,
    RANKS,
    SIZE,
    STOPPED,
    drawn_options,
    mostly,
    told_or_refused,
)
from fuzzing import cases, in_time
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from commrt.errors import CommrtError
from commrt.tools.commands import app as commands
from commrt.tools.commands.app import app
from commrt.tools.measuring import probing

COMMAND = Path(sys.executable).with_name("commrt")
PROVEN = mostly("ring", "torus2d", "gossip", "broadcast", "scatter", "all_gather", "all_to_all", "barrier", "GATHER")
CLUSTER = mostly("abci", "desk.toml", "/", "/dev/null", "/nowhere.toml")
WIRE = mostly("bf16", "fp32", "int4", "int8")
PICTURE = mostly("a.svg", "a.png", "a.txt", "/nowhere/a.svg", "/a.svg/b.svg", "a/", ".svg", ".")
SHAPES = {
    "--grid": mostly("2x2", "4x1", "3x2", "0x4", "-2x-2", "٢x٢", "99999999999x1", "2 x 2", "2X2"),
    "--both-ways": None,
    "--topology": mostly("dissemination", "hypercube"),
    "--within": COUNT,
}
LAWS = {
    "--steps": COUNT, "--seed": mostly("0", "7", bad=MANY), "--law": mostly("paper", "exponential", "slow"),
    "--set": mostly(
        "rate_per_s=2", "rate_per_s=nan", "low=inf", "rate_per_s=5e-324", "body_s=1e308", "=", "high=-1", "cap_s"
    ),
    "--times": FILE, "--exponent": SIZE,
}  # fmt: skip
EXCHANGE = {"--nbytes": SIZE, "--ranks": RANKS, "--cluster": CLUSTER, "--wire": WIRE}
STEP = {"--ranks": RANKS, "--cluster": CLUSTER, "--wire": WIRE, "--batch": COUNT, "--compute-ms": SIZE}
JSON = {"--json": None}
MODEL = {"--model": mostly("resnet50", "1e6", "1", "100")}
OPTIONS = {
    ("verify",): (
        PROVEN, {},
        {
            "--ranks": RANKS, "--backups": COUNT, "--schedule": mostly("tree", "ring", "direct", "bruck"),
            "--root": mostly("0", "1", "3", bad=MANY), "--show": None, **JSON, **SHAPES,
        },
    ),
    ("simulate", "exchange"): (ALGORITHM, {"--nbytes": SIZE}, {**EXCHANGE, **SHAPES, **JSON}),
    ("simulate", "step"): (
        ALGORITHM, MODEL,
        {
            "--bucket-cap-mb": SIZE, "--jitter": SIZE, "--steps": COUNT, "--seed": mostly("0", "7", bad=MANY), **STEP,
            **SHAPES, **JSON,
        },
    ),
    ("simulate", "local"): (None, MODEL, {"--bucket-cap-mb": SIZE, **STEP, **LOCAL, **JSON}),
    ("simulate", "backups"): (None, {}, {"--ranks": RANKS, **LAWS, **JSON}),
    ("plan", "exchange"): (None, {"--nbytes": SIZE}, {**EXCHANGE, **JSON}),
    ("plan", "step"): (None, MODEL, {**STEP, **JSON}),
    ("plan", "backups"): (None, MODEL, {"--backups": mostly("auto", "1", "0", "3"), **STEP, **LAWS, **JSON}),
    ("plan", "collective"): (PROVEN, {}, {"--nbytes": SIZE, "--ranks": RANKS, "--cluster": CLUSTER, **JSON}),
    ("draw", "schedule"): (ALGORITHM, {"--out": PICTURE}, {"--ranks": RANKS, "--cluster": CLUSTER, **SHAPES}),
    ("draw", "step"): (ALGORITHM, {"--out": PICTURE, **MODEL}, {"--bucket-cap-mb": SIZE, **STEP, **SHAPES}),
    ("draw", "scaling"): (None, {"--out": PICTURE, **MODEL}, STEP),
    ("draw", "recorded"): (FILE, {"--out": PICTURE}, {"--step": COUNT}),
    ("probe",): (
        None, {}, {"--workers": RANKS, "--timeout-s": SIZE, "--out": mostly("a.toml", "/nowhere/a.toml", "/")},
    ),
}  # fmt: skip
"""Of each command: its argument, options that it is mostly given, and the others."""


@st.composite
def lines(draw, first):
    """A line of `first` or of one of its commands; now and then one of another command, or without what it needs."""
    command = draw(st.sampled_from([words for words in OPTIONS if words[0] == first]))
    argument, usual, options = OPTIONS[command]
    if draw(st.integers(0, 7)) == 0:
        _, usual, options = OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]
    words = list(command) if argument is None else [*command, draw(argument)]
    for option, values in usual.items():
        words += [option, draw(values)]
    return words + drawn_options(draw, options)


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """No worker, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    stopped = CommrtError(STOPPED)
    monkeypatch.setattr(probing, "run_workers", lambda workers, body: (_ for _ in ()).throw(stopped))


@cases(25)
@given(words=lines("verify"))
def test_verify_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words)


@cases(25)
@given(words=lines("simulate"))
def test_simulate_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words)


@cases(15)
@given(words=lines("plan"))
def test_plan_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words)


@cases(8)
@given(words=lines("draw"))
def test_draw_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words, may_be_silent=True)


@cases(20)
@given(words=lines("probe"))
def test_probe_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(app, words)


@for_each(
    ("words", "says"),
    [
        (["verify", "a\nb\x1b[31m"], r"no algorithm is called 'a\\nb\\x1b"),
        (["verify", "9" * 5000], r"no algorithm is called '9+ \.\.\. 9+': choose one of"),
        (["simulate", "exchange", "ring", "--nbytes", "inf"], "--nbytes inf: give a number"),
        (
            ["simulate", "step", "ring", "--model", "1e6", "--bucket-cap-mb", "inf"],
            "--bucket-cap-mb inf: give a number",
        ),
        (
            [
                "simulate",
                "step",
                "ring",
                "--model",
                "1e6",
                "--compute-ms",
                "1",
                "--jitter",
                "1",
                "--steps",
                "1000000000",
            ],
            "1,000,000,000 steps of 4 ranks are too many: give up to --steps 2500000",
        ),
        (
            ["draw", "schedule", "ring", "--out", "/nowhere/a.svg"],
            "--out /nowhere/a.svg cannot be written: there is no folder /nowhere",
        ),
        (["probe", "--out", "a.toml", "--timeout-s", "nan"], "--timeout-s=nan is no deadline"),
        (
            ["simulate", "exchange", "ring", "--nbytes", "1", "--cluster", "\udcff.toml"],
            r"\\udcff\.toml cannot be read",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(nothing_starts, monkeypatch, capsys, words, says):
    monkeypatch.setattr(sys, "argv", ["commrt", *words])
    with in_time(), pytest.raises(SystemExit) as end:
        commands.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert re.fullmatch(f"commrt: .*{says}.*\n", said.err), said.err
    assert len(said.err) < 2000


COUNTED = [
    "verify ring", "simulate exchange ring --nbytes 1", "simulate step ring --model resnet50",
    "simulate local --model resnet50", "simulate backups", "plan exchange --nbytes 1", "plan step --model resnet50",
    "plan backups --model resnet50", "plan collective barrier", "draw schedule ring --out a.svg",
    "draw step ring --model resnet50 --out a.svg", "draw scaling --model resnet50 --out a.svg",
]  # fmt: skip


@for_each(("line", "ranks"), product(COUNTED, ["0", "-1", "1e9", "1000000000", "65537"]))
def test_numbers_of_ranks_that_nobody_has_are_refused_at_once(nothing_starts, line, ranks):
    with in_time(10):
        assert CliRunner().invoke(app, [*line.split(), "--ranks", ranks]).exit_code == 2
