# SPDX-License-Identifier: Apache-2.0
"""``commrt draw``: that pictures are made, and say what they show; how they look a person must see."""

import json
import re
import sys
from itertools import repeat
from xml.etree import ElementTree as ET

import pytest
from cases import for_each
from commands import invoke, refused

from commrt.errors import UsageError
from commrt.schedule import ADD, Schedule, Step
from commrt.tools.pictures.drawing import draw_schedule


def drawn(path, line, *more):
    """Return what the SVG says that it shows: matplotlib writes its texts as comments."""
    done = invoke(line, *more, "--out", path)
    assert (done.exit_code, done.stdout) == (0, f"wrote {path}\n")
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_a_schedule_is_drawn_with_an_arrow_for_each_transfer(tmp_path):
    path = tmp_path / "torus.svg"
    told = drawn(path, "draw schedule torus2d --ranks 6 --grid 3x2")
    assert {"torus 3x2: 6 ranks, 6 chunks, 6 steps", *(f"rank {rank}" for rank in range(6))} <= set(told)
    ids = [element.get("id", "") for element in ET.parse(path).iter()]  # noqa: S314  # our own
    grounds = 2 + 2  # of the figure, the axes, and every second phase
    assert sum(each.startswith("patch_") for each in ids) == grounds + 6 * 6


SCALING = "draw scaling --ranks 64 --model resnet50"


@for_each(
    ("line", "shown", "not_shown"),
    [
        (
            "draw step torus2d --ranks 1088 --grid 32x34 --model resnet50 --wire fp16",
            ["6.85 ms not hidden, efficiency 87.9%", "steps: 31 adding, 33 adding, 33 copying, 31 copying"],
            [],
        ),
        (
            "draw step direct --ranks 64 --within 4 --model resnet50 --wire int4",
            ["resnet50 on 64 ranks of abci: direct 4x16, int4"],
            [],
        ),
        (SCALING, ["ring", "halving_doubling", "torus2d", "gossip", "8", "64"], ["128", "direct"]),
        (f"{SCALING} --wire int8", ["direct"], ["ring"]),
    ],
)
def test_steps_and_scaling_are_drawn_with_what_is_not_hidden_and_for_what_carries_the_wire(
    line, shown, not_shown, tmp_path
):
    told = drawn(tmp_path / "picture.svg", line)
    assert set(shown) <= set(told)
    assert set(told).isdisjoint(not_shown)


def trace_of(path, ranks=2, steps=6, step_key="step"):
    """Each step computes for 4 ms, waits for 2 of them, and steps the optimizer; all begin together."""
    spans = [("forward", 0, 1000), ("backward", 1000, 3000), ("wait", 2000, 2000), ("optimizer", 4000, 1000)]
    spans += [("bucket", 1500, 1000), ("hop", 1700, 500), ("combine", 2200, 100)]
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    for rank in range(ranks):
        for step in range(steps):
            where = {"ph": "X", "pid": rank, "tid": rank, "args": {step_key: step}}
            events += [where | {"name": name, "ts": 10_000.0 * step + at, "dur": dur} for name, at, dur in spans]
    path.write_text(json.dumps({"traceEvents": events}))


@for_each(
    ("key", "options", "step"),
    [("step", [], 4), ("step", ["--step", 2], 2), ("bundle", ["--step", 2], 2)],
    ids=["a typical one", "one that was asked for", "one of steps without a number, as gossip's and DDP's"],
)
def test_a_recorded_step_is_drawn_for_every_rank(key, options, step, tmp_path):
    trace_of(tmp_path / "trace.json", step_key=key)
    told = drawn(tmp_path / "run.svg", "draw recorded", tmp_path / "trace.json", *options)
    assert f"trace.json, step {step}: 10.00 ms" in told
    assert {"rank 0", "rank 1", "forward", "backward", "not hidden", "pack, unpack", "hop"} <= set(told)


@for_each(
    ("text", "says"),
    [
        ('{"traceEvents": []}', "holds no training step: record one, as examples/mnist/train.py --trace does"),
        (None, "trace.json holds steps 1 to 5"),
    ],
)
def test_a_step_that_was_not_recorded_is_refused_in_words(text, says, tmp_path):
    path = tmp_path / "trace.json"
    trace_of(path) if text is None else path.write_text(text)
    assert says in refused("draw recorded --step 9", path, "--out", tmp_path / "run.svg")


STEP = Step.of(src=0, dst=1, lo=0, hi=1, combine=ADD)


@for_each(("ranks", "steps", "has"), [(65, None, "65 ranks"), (64, repeat(STEP), "more than 130 steps")])
def test_a_schedule_larger_than_a_picture_can_show_is_refused_before_all_of_it_is_made(ranks, steps, has):
    with pytest.raises(UsageError, match=f"mine has {has}: a picture can show 64 ranks and 130 steps"):
        draw_schedule(Schedule("mine", ranks, 1, lambda: iter(steps)))


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'commrt[draw]'" in refused("draw schedule ring --out", tmp_path / "ring.svg")
