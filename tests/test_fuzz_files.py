# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file that a command reads back: times, a workload, a picture, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fuzzing import FILES, NUMBERS, VALUES, cases, met
from hypothesis import given
from hypothesis import strategies as st

from commrt.tools.commands.draw import recorded
from commrt.tools.pictures.files import compute_times_s, read_spans, read_times
from commrt.tools.planning.workload import Workload

pytest.importorskip("matplotlib")

RANGES = ["forward", "backward", "wait", "optimizer", "bucket", "hop", "combine", "other"]


def event(name, rank, begin, duration, step, **more):
    return {"ph": "X", "name": name, "pid": rank, "ts": begin, "dur": duration, "args": {"step": step}} | more


TIMES = st.integers(0, 10_000) | NUMBERS
EVENTS = st.builds(
    event, st.sampled_from(RANGES), st.integers(0, 2) | VALUES, TIMES, TIMES, st.none() | st.integers(0, 5) | VALUES
)
TRACES = st.fixed_dictionaries({"traceEvents": st.lists(EVENTS | VALUES, max_size=12) | VALUES})


def whole(steps=6, ranks=2):
    """What a run records."""
    for step in range(steps):
        for rank in range(ranks):
            begin = 1000 * step + 10 * rank
            for number, name in enumerate(["forward", "backward", "wait", "optimizer"]):
                yield event(name, rank, begin + 100 * number, 90, step)


@st.composite
def changed_runs(draw):
    """A whole run in which a few values are others."""
    events = [*whole()]
    for _ in range(draw(st.integers(1, 3))):
        place, key = (
            draw(st.integers(0, len(events) - 1)),
            draw(st.sampled_from(["name", "pid", "ts", "dur", "args", "ph"])),
        )
        events[place] = events[place] | {key: draw(VALUES | NUMBERS)}
    return {"traceEvents": events}


DOCUMENTS = st.one_of(
    (TRACES | changed_runs() | VALUES | st.lists(st.lists(NUMBERS, max_size=3), max_size=4)).map(json.dumps), FILES
)

LAYERS = st.fixed_dictionaries({"numel": st.integers(0, 9) | NUMBERS | VALUES, "work": NUMBERS | VALUES})
WORKLOADS = st.fixed_dictionaries({"name": st.just("mine") | VALUES, "layers": st.lists(LAYERS, max_size=4) | VALUES})


def with_file(content, read):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read(str(path), str(Path(folder) / "run.svg"))


@cases(75)
@given(DOCUMENTS)
def test_times_of_any_file_are_times_or_are_refused_in_words(content):
    times = met(with_file, content, lambda path, _: read_times(path))
    assert times is None or (times > 0).all()


@cases(75)
@given(DOCUMENTS)
def test_a_timeline_of_any_file_is_one_or_is_refused_in_words(content):
    spans = met(with_file, content, lambda path, _: read_spans(path))
    if spans is not None:
        met(compute_times_s, spans)


@cases(10)
@given(changed_runs().map(json.dumps) | DOCUMENTS, st.none() | st.integers(-1, 7))
def test_a_picture_of_any_run_is_drawn_or_refused_in_words(content, step):
    met(with_file, content, lambda path, out: recorded(path, out, step))


@cases(75)
@given(WORKLOADS.map(json.dumps) | DOCUMENTS)
def test_a_workload_of_any_file_gives_buckets_or_is_refused_in_words(content):
    workload = met(with_file, content, lambda path, _: Workload.read(path))
    if workload is not None:
        assert 1 / 3 <= workload.buckets(1e6, 4)[-1].at <= 1 + 1e-9
        assert Workload.parsed(workload.text(), "again") == workload
