# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed after ``commrt``: it works, or it is refused with exit code 2 and one line."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path

import pytest
from cases import for_each
from fuzzing import NUMBERS, ODD_TEXTS, TEXTS, cases, in_time, met
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.tools.commands import app as commands
from commrt.tools.commands import probe, train
from commrt.tools.commands.app import app
from commrt.tools.commands.inject_faults import check, parse

COMMAND = Path(sys.executable).with_name("commrt")
BAD = ODD_TEXTS | TEXTS | NUMBERS.map(str)
MANY = st.sampled_from(["-1", "0", "4097", "65537", "1e9", "1000000000", "9" * 30, "nan", "1_0", "٣", "4.0"])


def mostly(*good, bad=BAD):
    """A value of `good`, or now and then a bad one."""
    return st.one_of(*[st.sampled_from(good)] * 4, bad)


ALGORITHM = mostly(
    "ring", "halving_doubling", "torus2d", "direct", "gossip", "local", "backup", "scaling", "RING", "ddp"
)
PROVEN = mostly("ring", "torus2d", "gossip", "broadcast", "scatter", "all_gather", "all_to_all", "barrier", "GATHER")
RANKS = mostly("1", "2", "3", "4", "6", "8", "13", bad=MANY)
COUNT = mostly("1", "2", "5", bad=MANY | BAD)
SIZE = mostly("1", "0.5", "25", "1e6", bad=BAD)
CLUSTER = mostly("abci", "desk.toml", "/", "/dev/null", "/nowhere.toml")
FILE = mostly("/dev/null", "/nowhere.json", "/", "..")
SHARED = {
    "--ranks": RANKS, "--cluster": CLUSTER, "--model": mostly("resnet50", "1e6", "1", "100"),
    "--wire": mostly("bf16", "fp32", "int4", "int8"), "--batch": COUNT, "--compute-ms": SIZE,
}  # fmt: skip
SHAPES = {
    "--grid": mostly("2x2", "4x1", "3x2", "0x4", "-2x-2", "٢x٢", "99999999999x1", "2 x 2", "2X2"),
    "--both-ways": None,
    "--topology": mostly("dissemination", "hypercube"),
    "--within": COUNT,
}
LOCAL = {"--period": COUNT, "--delay": COUNT, "--fragments": COUNT}
LAWS = {
    "--steps": COUNT, "--seed": mostly("0", "7", bad=MANY), "--law": mostly("paper", "exponential", "slow"),
    "--set": mostly(
        "rate_per_s=2", "rate_per_s=nan", "low=inf", "rate_per_s=5e-324", "body_s=1e308", "=", "high=-1", "cap_s"
    ),
    "--times": FILE, "--exponent": SIZE,
}  # fmt: skip
OPTIONS = {
    "verify": (
        PROVEN,
        {
            "--ranks": RANKS, "--backups": COUNT, "--schedule": mostly("tree", "ring", "direct", "bruck"),
            "--root": mostly("0", "1", "3", bad=MANY), "--show": None, "--json": None, **SHAPES,
        },
    ),
    "simulate": (
        ALGORITHM,
        {
            "--nbytes": SIZE, "--bucket-cap-mb": SIZE, "--jitter": SIZE, "--json": None, **SHARED, **SHAPES, **LAWS,
            **LOCAL,
        },
    ),
    "plan": (
        None,
        {
            "--nbytes": SIZE, "--backups": mostly("auto", "1", "0", "3"),
            "--json": None, **SHARED, **LAWS,
        },
    ),
    "draw": (ALGORITHM, {"--bucket-cap-mb": SIZE, "--step": COUNT, **SHARED, **SHAPES}),
    "train": (
        None,
        {
            "--workers": RANKS, "--algorithm": ALGORITHM, "--backups": COUNT, "--compare": ALGORITHM,
            "--epochs": COUNT, "--batch-size": mostly("64", "4000"), "--lr": SIZE,
            "--recipe": mostly("plain", "large-batch"), "--seed": mostly("0", "-1"),
            "--wire": mostly("bf16", "int2", "float8"), "--bucket-cap-mb": SIZE, "--timeout-s": SIZE,
            "--start-timeout-s": SIZE, "--trace": FILE, "--curve": FILE, "--json": None, **LOCAL,
            "--outer": mostly("0.7,0.9", "1,0", "0.7", "nan,0", "1e400,0", "0.7,0.9,1", ","),
            "--inject": mostly("kill:rank=0,step=1", "slow:prob=0.1,seconds=1", "kill:rank=1,step=2", "stop:rank=0"),
        },
    ),
    "probe": (None, {"--workers": RANKS, "--timeout-s": SIZE, "--out": mostly("a.toml", "/nowhere/a.toml", "/")}),
}  # fmt: skip


@st.composite
def lines(draw, name):
    """A command line."""
    argument, options = OPTIONS[name]
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=6))
    words = [name] if argument is None else [name, draw(argument)]
    for option in chosen:
        words += [option] if options[option] is None else [option, draw(options[option])]
    return words


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """No worker, and a folder to write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "require_images", lambda: None)
    monkeypatch.setattr(train, "_start", lambda jobs, workers: [])
    monkeypatch.setattr(train, "_report", lambda results, as_json: None)
    monkeypatch.setattr(probe, "run_workers", lambda workers, body: (_ for _ in ()).throw(CommrtError("stopped here")))


def told_or_refused(words):
    """As `main` does: bad input is one line and exit code 2."""
    with in_time():
        result = CliRunner().invoke(app, words)
    refusal = result.exception
    if isinstance(refusal, CommrtError):
        line = commands.in_one_line(refusal)
        assert line.isprintable()
        assert len(line) < 2000, line
        assert isinstance(refusal, UsageError | ScheduleError | DisagreementError) or "stopped here" in line
    elif refusal is None or (isinstance(refusal, SystemExit) and result.exit_code in (0, 1, 2)):
        assert result.output or words[0] == "draw" or words[0] == "train"
        assert "nan" not in result.stdout.lower().replace("nancy", "") or "'nan" in result.stdout, result.stdout
    else:
        raise refusal


@cases(25)
@given(words=lines("verify"))
def test_verify_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(words)


@cases(25)
@given(words=lines("simulate"))
def test_simulate_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(words)


@cases(15)
@given(words=lines("plan"))
def test_plan_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(words)


@cases(8)
@given(words=lines("draw"), out=mostly("a.svg", "a.png", "a.txt", "/nowhere/a.svg", "/a.svg/b.svg", "a/", ".svg", "."))
def test_draw_takes_or_refuses_any_line(nothing_starts, words, out):
    told_or_refused([*words, "--out", out])


@cases(60)
@given(words=lines("train"))
def test_train_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(words)


@cases(20)
@given(words=lines("probe"))
def test_probe_takes_or_refuses_any_line(nothing_starts, words):
    told_or_refused(words)


FIELDS = st.sampled_from(["rank", "step", "prob", "seconds", "low", "high", "kind", ""])
PARTS = st.builds("{}={}".format, FIELDS, mostly("0", "1", "0.5")) | TEXTS


@cases(100)
@given(
    st.builds("{}:{}".format, mostly("kill", "slow", "stop", bad=TEXTS), st.lists(PARTS, max_size=5).map(",".join))
    | TEXTS
)
def test_a_fault_of_any_text_is_one_or_is_refused_in_words(text):
    fault = met(parse, text)
    if fault is not None:
        met(check, fault, 4, 62)


@for_each(
    ("words", "says"),
    [
        (["verify", "a\nb\x1b[31m"], r"no algorithm is called 'a\\nb\\x1b"),
        (["verify", "9" * 5000], r"no algorithm is called '9+ \.\.\. 9+': choose one of"),
        (["simulate", "ring", "--nbytes", "inf"], "--nbytes inf: give a number"),
        (["train", "--trace", "1" * 300], "--trace: no file can have this name"),
        (["simulate", "ring", "--nbytes", "1", "--bucket-cap-mb", "inf"], "--bucket-cap-mb inf: give a number"),
        (
            ["simulate", "ring", "--model", "1e6", "--compute-ms", "1", "--jitter", "1", "--steps", "1000000000"],
            "1,000,000,000 steps of 4 ranks are too many: give up to --steps 2500000",
        ),
        (
            ["draw", "ring", "--out", "/nowhere/a.svg"],
            "--out /nowhere/a.svg cannot be written: there is no folder /nowhere",
        ),
        (["probe", "--out", "a.toml", "--timeout-s", "nan"], "--timeout-s=nan is no deadline"),
        (["simulate", "ring", "--nbytes", "1", "--cluster", "\udcff.toml"], r"\\udcff\.toml cannot be read"),
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


COMMANDS = ("verify", "simulate", "plan", "draw")


@for_each(("name", "ranks"), product(COMMANDS, ["0", "-1", "1e9", "1000000000", "65537"]))
def test_numbers_of_ranks_that_nobody_has_are_refused_at_once(nothing_starts, name, ranks):
    words = {"verify": ["ring"], "simulate": ["ring"], "plan": [], "draw": ["ring", "--out", "a.svg"]}
    with in_time(10):
        assert CliRunner().invoke(app, [name, *words[name], "--ranks", ranks]).exit_code == 2
