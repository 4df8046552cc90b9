# SPDX-License-Identifier: Apache-2.0
"""Files of commands: pictures to write, recorded timelines and step times to read.

What cannot be written is refused before the work starts.
"""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from commrt.errors import CommrtError, UsageError
from commrt.files import read_text
from commrt.tools.planning.stragglers import Times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_FORMATS = (".svg", ".png", ".pdf")
WARMUP_STEPS = 3
"""The first steps, in which programs are made."""
MAX_COUNT = 1e15
"""Largest rank, step or time in microseconds (30 years)."""
MAX_STEP_S = 1e9
TIMES_FORMAT = (
    "give a timeline, such as examples/mnist/train.py --trace writes, or write one list of seconds"
    " per step, one number per rank, as JSON [[1.2, 1.3], [1.1, 4.0]] or as lines of CSV"
)


def require_writable(option: str, path: str, example: str, endings: Sequence[str] = ()) -> None:
    """Raise `UsageError` if no file can be written at `path`, the value of `option`.

    `example` is a file name. With `endings` the name must end in one of them.
    """
    if not path:
        raise UsageError(
            f'{option} "": the name of the file is empty: give one, such as {option} {example}'
        )
    file = Path(path)
    if endings and file.suffix not in endings:
        raise UsageError(f"{option} {path}: give a file that ends in {', '.join(endings)}")
    try:
        folder = file.resolve().parent
        exists = file.exists()
        is_folder = file.is_dir()
    except OSError as error:  # a name that is too long, for instance
        raise UsageError(f"{option}: no file can have this name: {error.strerror}") from error
    if not folder.is_dir():
        raise UsageError(
            f"{option} {path} cannot be written: there is no folder {folder}, make it first"
        )
    if is_folder:
        raise UsageError(f"{option} {path} is a folder: give a file, such as {file / example}")
    if not os.access(file if exists else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written by this user: give another file")


def write(option: str, path: str, save: Callable[[], object]) -> None:
    """Call `save`, which writes `path`; raise `CommrtError` if the disk refuses."""
    try:
        save()
    except OSError as error:
        raise CommrtError(f"{option} {path} could not be written: {error}") from error


def require_picture(out: str) -> None:
    """Raise `UsageError` unless a picture can be written to `out`."""
    require_writable("--out", out, "picture.svg", PICTURE_FORMATS)


def save_picture(figure: Figure, out: str) -> None:
    """Write `figure` to `out`; raise `CommrtError` if the disk refuses."""
    write("--out", out, lambda: figure.savefig(out, dpi=150))


class TimelineSpan(NamedTuple):
    """One recorded range, such as a backward pass of one rank."""

    rank: int
    name: str
    begin_ms: float
    end_ms: float
    step: int | None


def chrome_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a trace for Chrome and ui.perfetto.dev: a process per rank, a row per thread."""
    rows = list(events)
    threads = {(row["pid"], row["tid"]): row["thread"] for row in rows}
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in threads})
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        for (rank, thread), name in threads.items()
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + rows}


def read_spans(file: str) -> list[TimelineSpan]:
    """Return all ranges in `file`, a timeline of `chrome_trace`; raise `UsageError` for others."""
    text = read_text(file)
    try:
        return spans_of(json.loads(text)["traceEvents"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is no timeline of chrome_trace: {error!r:.200}") from error


def spans_of(events: Iterable[dict[str, Any]]) -> list[TimelineSpan]:
    """Return the ranges in Chrome's trace `events`; raise KeyError or TypeError if malformed."""
    return [_parse_span(event) for event in events if event["ph"] == "X"]


def _parse_span(event: dict[str, Any]) -> TimelineSpan:
    rank = event["pid"]
    name = event["name"]
    step = dict(event["args"]).get("step")
    begin_us = event["ts"]
    width_us = event["dur"]
    is_valid = isinstance(name, str) and type(rank) is int and (step is None or type(step) is int)
    if not (
        is_valid
        and all(0 <= number < MAX_COUNT for number in (rank, step or 0, begin_us, width_us))
    ):
        raise TypeError(
            f"name must be a text, and pid, ts, dur and args.step numbers from 0 to {MAX_COUNT:g}"
        )
    return TimelineSpan(rank, name, begin_us / 1e3, (begin_us + width_us) / 1e3, step)


def compute_times_s(spans: Sequence[TimelineSpan]) -> list[list[float]]:
    """Return [steps][ranks] seconds from begin of forward to end of backward pass, without waits.

    The list has as many steps as every rank has made, without the first `WARMUP_STEPS`.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    begin_ms = dict[int, float]()
    # inner ranges before outer ones
    for span in sorted(spans, key=lambda span: (span.end_ms, -span.begin_ms)):
        if span.name == "forward":
            begin_ms[span.rank] = span.begin_ms
        elif span.rank in begin_ms and span.name == "wait":
            begin_ms[span.rank] += span.end_ms - span.begin_ms
        elif span.rank in begin_ms and span.name == "backward":
            by_rank[span.rank].append((span.end_ms - begin_ms.pop(span.rank)) / 1e3)
    return [
        list(step)
        for step in zip(*(by_rank[rank][WARMUP_STEPS:] for rank in sorted(by_rank)), strict=False)
    ]


def read_times(path: str) -> Times:
    """Return the step times in `path`, a timeline, JSON or CSV; `UsageError` names a bad place."""
    text = read_text(path, "utf-8-sig").strip()
    steps = _parse_json(path, text) if text.startswith(("[", "{")) else _parse_csv(path, text)
    if not steps:
        raise UsageError(f"{path} holds no step: {TIMES_FORMAT}")
    ranks = len(steps[0])
    for number, step in enumerate(steps):
        if len(step) != ranks or not step:
            raise UsageError(
                f"{path}: step {number} has {len(step)} times, step 0 has {ranks}: give each rank's"
            )
    times_s = np.array([[_number(value) for value in step] for step in steps])
    for number, rank in np.argwhere(~((times_s > 0) & (times_s < MAX_STEP_S)))[:1]:
        raise UsageError(
            f"{path}: step {number}, rank {rank}: {steps[number][rank]!r:.80} is no number of"
            f" seconds above 0 and below {MAX_STEP_S:g}"
        )
    return times_s


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return nan


def _parse_json(path: str, text: str) -> list[Sequence[object]]:
    try:
        steps = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}; {TIMES_FORMAT}") from error
    if isinstance(steps, dict) and "traceEvents" in steps:
        return [*compute_times_s(read_spans(path))]
    if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
        raise UsageError(f"{path} is no list of lists: {TIMES_FORMAT}")
    return steps


def _parse_csv(path: str, text: str) -> list[Sequence[object]]:
    """Return the lines, without a first line of column names."""
    try:
        lines = [line for line in csv.reader(text.splitlines()) if line]
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}; {TIMES_FORMAT}") from error
    return list(lines[1:] if lines and isnan(_number(lines[0][0])) else lines)
