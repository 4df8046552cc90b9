# SPDX-License-Identifier: Apache-2.0
"""A recorded run's step times, from a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from commrt.cli.timelines import computing_s
from commrt.cli.timelines import read as timeline
from commrt.errors import UsageError
from commrt.pricing.stragglers import Recorded

__all__ = ["read"]

FORM = (
    "give a file of commrt train --trace, or write one list of seconds per step, one number per rank, as JSON "
    "[[1.2, 1.3], [1.1, 4.0]] or as lines of CSV"
)
MOST_S = 1e9
"""Thirty years."""


def read(path: str) -> Recorded:
    """The times in `path`, JSON or CSV; raises `UsageError` that names the place of what is wrong."""
    text = _text(path)
    steps = _from_json(path, text) if text.startswith(("[", "{")) else _from_csv(path, text)
    if not steps:
        raise UsageError(f"{path} holds no step: {FORM}")
    return Recorded(np.array([_times(path, number, step, len(steps[0])) for number, step in enumerate(steps)]))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _from_json(path: str, text: str) -> list[Sequence[object]]:
    try:
        steps = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}; {FORM}") from error
    if isinstance(steps, dict) and "traceEvents" in steps:
        return [*computing_s(timeline(path))]
    if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
        raise UsageError(f"{path} is no list of lists: {FORM}")
    return steps


def _from_csv(path: str, text: str) -> list[Sequence[object]]:
    """Without the first line if nothing in it is a number: the names of the columns."""
    try:
        lines = [[_as_number(cell) for cell in line] for line in csv.reader(text.splitlines()) if line]
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}; {FORM}") from error
    is_header = bool(lines) and all(isinstance(cell, str) for cell in lines[0])
    return list(lines[is_header:])


def _as_number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell.strip()


def _times(path: str, number: int, step: Sequence[object], ranks: int) -> list[float]:
    """A step's times, if it has one for each rank."""
    if len(step) != ranks or not step:
        raise UsageError(f"{path}: step {number} has {len(step)} times, step 0 has {ranks}: give each rank's")
    return [_time(f"{path}: step {number}, rank {rank}", value) for rank, value in enumerate(step)]


def _time(place: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST_S:
        return float(value)
    raise UsageError(f"{place}: {value!r:.80} is no number of seconds above 0 and below {MOST_S:g}")
