# SPDX-License-Identifier: Apache-2.0
"""Timelines of ``commrt train --trace``, and step times of recorded runs, read from files."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commrt.cost.stragglers import Recorded
from commrt.errors import UsageError

__all__ = ["WARMUP_STEPS", "Span", "compute_times_s", "read_spans", "read_times", "spans_of"]

WARMUP_STEPS = 3
"""The first steps, in which programs are made."""
MAX_COUNT = 1e15
"""Largest rank, step or time in microseconds (30 years)."""
MAX_STEP_S = 1e9
TIMES_FORMAT = (
    "give a file of commrt train --trace, or write one list of seconds per step, one number per rank, as JSON "
    "[[1.2, 1.3], [1.1, 4.0]] or as lines of CSV"
)


class Span(NamedTuple):
    """One recorded range, such as a backward pass of one rank."""

    rank: int
    name: str
    begin_ms: float
    end_ms: float
    step: int | None


def read_spans(file: str) -> list[Span]:
    """Return all ranges in `file`, which ``commrt train --trace`` wrote; raise `UsageError` for another file."""
    text = _read_text(file, "utf-8")
    try:
        return spans_of(json.loads(text)["traceEvents"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is no timeline of commrt train --trace: {error!r:.200}") from error


def _read_text(file: str, encoding: str) -> str:
    try:
        return Path(file).read_text(encoding=encoding)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the ranges among `events` in Chrome's trace format; raise KeyError or TypeError for malformed events."""
    return [_parse_span(event) for event in events if event["ph"] == "X"]


def _parse_span(event: dict[str, Any]) -> Span:
    args = event["args"]
    if not isinstance(args, dict):
        raise TypeError("args must be an object")
    step = args.get("step")
    if not (isinstance(event["name"], str) and _is_count(event["pid"]) and (step is None or _is_count(step))):
        raise TypeError("name must be a text, and pid and step must be whole numbers from 0 on")
    begin_ms = _parse_ms(event["ts"])
    return Span(event["pid"], event["name"], begin_ms, begin_ms + _parse_ms(event["dur"]), step)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _parse_ms(time_us: object) -> float:
    if isinstance(time_us, bool) or not isinstance(time_us, int | float) or not 0 <= time_us < MAX_COUNT:
        raise TypeError(f"ts and dur must be microseconds from 0 to {MAX_COUNT:g}")
    return time_us / 1e3


def compute_times_s(spans: Sequence[Span]) -> list[list[float]]:
    """Return [steps][ranks]: seconds from the begin of the forward to the end of the backward pass, without waits.

    The list has as many steps as every rank has made, without the first `WARMUP_STEPS`.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    begin_ms = dict[int, float]()
    for span in sorted(spans, key=lambda span: (span.end_ms, -span.begin_ms)):  # inner ranges before outer ones
        if span.name == "forward":
            begin_ms[span.rank] = span.begin_ms
        elif span.rank in begin_ms and span.name == "wait":
            begin_ms[span.rank] += span.end_ms - span.begin_ms
        elif span.rank in begin_ms and span.name == "backward":
            by_rank[span.rank].append((span.end_ms - begin_ms.pop(span.rank)) / 1e3)
    return [list(step) for step in zip(*(by_rank[rank][WARMUP_STEPS:] for rank in sorted(by_rank)), strict=False)]


def read_times(path: str) -> Recorded:
    """Return the step times in `path`: a timeline, JSON or CSV; raise `UsageError` that names the malformed place."""
    text = _read_text(path, "utf-8-sig").strip()
    steps = _parse_json(path, text) if text.startswith(("[", "{")) else _parse_csv(path, text)
    if not steps:
        raise UsageError(f"{path} holds no step: {TIMES_FORMAT}")
    ranks = len(steps[0])
    for number, step in enumerate(steps):
        if len(step) != ranks or not step:
            raise UsageError(f"{path}: step {number} has {len(step)} times, step 0 has {ranks}: give each rank's")
        for rank, value in enumerate(step):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_STEP_S:
                place = f"{path}: step {number}, rank {rank}"
                raise UsageError(f"{place}: {value!r:.80} is no number of seconds above 0 and below {MAX_STEP_S:g}")
    return Recorded(np.array(steps, dtype=np.float64))


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
    """Return the lines as numbers, without a first line of column names."""
    try:
        lines = [[_parse_cell(cell) for cell in line] for line in csv.reader(text.splitlines()) if line]
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}; {TIMES_FORMAT}") from error
    has_header = bool(lines) and all(isinstance(cell, str) for cell in lines[0])
    return list(lines[has_header:])


def _parse_cell(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell.strip()
