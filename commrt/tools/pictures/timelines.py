# SPDX-License-Identifier: Apache-2.0
"""Read the timelines of recorded runs, which `threads.chrome_trace` has written; writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from commrt.errors import UsageError
from commrt.files import read_text

MAX_COUNT = 1e15
"""Largest rank, step or time in microseconds (30 years)."""


class TimelineSpan(NamedTuple):
    """One recorded range, such as a backward pass of one rank."""

    rank: int
    name: str
    begin_ms: float
    end_ms: float
    step: int | None


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
