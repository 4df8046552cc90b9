# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: that pictures are made, and say what they show; how they look a person must see."""

from __future__ import annotations

import json
import re
import sys
from itertools import repeat
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from commrt.errors import UsageError
from commrt.schedule import ADD, Schedule, Step
from commrt.tools.commands.app import app
from commrt.tools.pictures.drawing import draw_schedule


def draw(*args):
    return CliRunner().invoke(app, ["draw", *map(str, args)], catch_exceptions=False)


def comments(path):
    """What an SVG of matplotlib's says it writes, as text."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_a_schedule_is_drawn_with_an_arrow_for_each_transfer(tmp_path):
    path = tmp_path / "torus.svg"
    draw("schedule", "torus2d", "--ranks", 12, "--grid", "4x3", "--out", path)
    assert "torus 4x3: 12 ranks, 12 chunks, 10 steps" in comments(path)
    assert {f"rank {rank}" for rank in range(12)} <= set(comments(path))
    ids = [element.get("id", "") for element in ET.parse(path).iter()]  # noqa: S314  # our own
    grounds = 2 + 4  # of the figure, the axes, and the phases
    assert sum(each.startswith("patch_") for each in ids) == grounds + 10 * 12


def test_a_step_is_drawn_with_what_is_not_hidden(tmp_path):
    path = tmp_path / "step.svg"
    draw("step", "torus2d", "--ranks", 1088, "--grid", "32x34", "--model", "resnet50", "--wire", "fp16", "--out", path)
    assert "6.85 ms not hidden, efficiency 87.9%" in comments(path)
    assert "steps: 31 adding, 33 adding, 33 copying, 31 copying" in comments(path)


def test_a_step_on_a_wire_of_codes_is_drawn(tmp_path):
    path = tmp_path / "step.svg"
    draw("step", "direct", "--ranks", 64, "--within", 4, "--model", "resnet50", "--wire", "int4", "--out", path)
    assert "direct 4x16, int4" in str(comments(path))


def test_scaling_is_drawn_for_every_algorithm(tmp_path):
    path = tmp_path / "scaling.svg"
    draw("scaling", "--ranks", 64, "--model", "resnet50", "--out", path)
    assert {"ring", "halving_doubling", "torus2d", "gossip", "8", "64"} <= set(comments(path))
    assert "128" not in comments(path)


def test_scaling_of_a_wire_of_codes_is_drawn_for_what_carries_it(tmp_path):
    path = tmp_path / "scaling.svg"
    draw("scaling", "--ranks", 64, "--model", "resnet50", "--wire", "int8", "--out", path)
    assert "direct" in comments(path)
    assert "ring" not in comments(path)


def trace_of(path, ranks=2, steps=6):
    """Each step computes for 4 ms, waits for 2 of them, and steps the optimizer; all begin together."""
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    for rank in range(ranks):
        for step in range(steps):
            begin = 10_000.0 * step
            spans = [("forward", 0, 1000), ("backward", 1000, 3000), ("wait", 2000, 2000), ("optimizer", 4000, 1000)]
            spans += [("bucket", 1500, 1000), ("hop", 1700, 500), ("combine", 2200, 100)]
            where = {"ph": "X", "pid": rank, "tid": rank, "args": {"step": step}}
            events += [where | {"name": name, "ts": begin + at, "dur": dur} for name, at, dur in spans]
    path.write_text(json.dumps({"traceEvents": events}))


def test_a_recorded_step_is_drawn_for_every_rank(tmp_path):
    trace_of(tmp_path / "trace.json")
    for options, step in (([], 4), (["--step", 2], 2)):
        draw("recorded", tmp_path / "trace.json", *options, "--out", tmp_path / "run.svg")
        told = comments(tmp_path / "run.svg")
        assert f"trace.json, step {step}: 10.00 ms" in told
        assert {"rank 0", "rank 1", "forward", "backward", "not hidden", "pack, unpack", "hop"} <= set(told)


def test_steps_without_a_number_are_counted(tmp_path):
    """As gossip's and DDP's, whose waits are of no step."""
    path = tmp_path / "trace.json"
    trace_of(path)
    path.write_text(path.read_text().replace('"step"', '"bundle"'))
    draw("recorded", path, "--step", 2, "--out", tmp_path / "run.svg")
    assert "trace.json, step 2: 10.00 ms" in comments(tmp_path / "run.svg")


@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        ("[1]", [], "is no timeline of chrome_trace"),
        ('{"traceEvents": []}', [], "holds no training step: record one, as examples/mnist/train.py --trace does"),
        (None, ["--step", 9], "--step 9: .*trace.json holds steps 1 to 5"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_in_words(text, args, says, tmp_path):
    path = tmp_path / "trace.json"
    trace_of(path) if text is None else path.write_text(text)
    with pytest.raises(UsageError, match=says):
        draw("recorded", path, *args, "--out", tmp_path / "run.svg")


def test_a_png_is_one(tmp_path):
    path = tmp_path / "ring.png"
    draw("schedule", "ring", "--out", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["schedule", "ring", "--out", "ring.txt"], "--out ring.txt: give a file that ends in .svg, .png, .pdf"),
        (["schedule", "ring", "--out", "/nowhere/ring.svg"], "/nowhere/ring.svg cannot be written"),
        (
            ["schedule", "ring", "--ranks", 100, "--out", "ring.svg"],
            "ring has 100 ranks: a picture can show 64 ranks and 130",
        ),
        (["scaling", "--model", "resnet50", "--ranks", 8, "--out", "a.svg"], "8 ranks: how algorithms scale is drawn"),
        (["step", "gossip", "--model", "resnet50", "--out", "step.svg"], "gossip exchanges between steps"),
        (["step", "local", "--model", "resnet50", "--out", "step.svg"], "local exchanges between steps"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(args, says):
    with pytest.raises(UsageError) as refusal:
        draw(*args)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["scaling", "--out", "scaling.svg"], "Missing option '--model'"),
        (["recorded", "trace.json", "--ranks", 4, "--out", "run.svg"], "No such option: --ranks"),
        (["schedule", "ring", "--step", 2, "--out", "ring.svg"], "No such option: --step"),
        (["ring", "--out", "ring.svg"], "No such command 'ring'"),
    ],
)
def test_a_picture_takes_only_the_options_that_it_uses(args, says):
    result = draw(*args)
    assert result.exit_code == 2
    assert says in result.stderr


def test_as_many_ranks_are_drawn_as_the_refusal_says():
    assert draw_schedule(Schedule("wide", 64, 1, lambda: iter([Step.of(0, 63, 0, 1, ADD)])))


def test_a_schedule_of_too_many_ranks_is_refused_before_its_steps_are_made():
    steps = [Step.of(src=0, dst=1, lo=0, hi=1, combine=ADD)]
    made = []
    large = Schedule("large", ranks=65536, chunks=1, steps=lambda: made.append(True) or iter(steps))
    with pytest.raises(UsageError, match="large has 65536 ranks: a picture can show 64 ranks and 130 steps"):
        draw_schedule(large)
    assert made == []


def test_a_schedule_without_an_end_is_refused_after_as_many_steps_as_a_picture_can_show():
    endless = Schedule("endless", 2, 1, lambda: repeat(Step.of(src=0, dst=1, lo=0, hi=1, combine=ADD)))
    with pytest.raises(UsageError, match="endless has more than 130 steps: a picture can show 64 ranks and 130 steps"):
        draw_schedule(endless)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'commrt\[draw\]'"):
        draw("schedule", "ring", "--out", tmp_path / "ring.svg")
