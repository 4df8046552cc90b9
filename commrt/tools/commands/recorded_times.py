# SPDX-License-Identifier: Apache-2.0
"""How long the ranks of a run computed, as a user has recorded it: a timeline, JSON or CSV.

Only reads the file; `UsageError` says what is wrong in it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np

from commrt.errors import UsageError
from commrt.files import read_text
from commrt.tools.pictures.step_windows import compute_times_s
from commrt.tools.pictures.timelines import read_spans
from commrt.tools.planning.computing_times import Times

MAX_STEP_S = 1e9
TIMES_FORMAT = (
    "give a timeline, such as examples/mnist/train.py --trace writes, or write one list of seconds"
    " per step, one number per rank, as JSON [[1.2, 1.3], [1.1, 4.0]] or as lines of CSV"
)


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
