# SPDX-License-Identifier: Apache-2.0
"""What ``commrt train --trace`` has written, read again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commrt.errors import UsageError

__all__ = ["WARM_STEPS", "Span", "computing_s", "read", "spans_of"]

WARM_STEPS = 3
"""At the begin, when programs are made."""
MOST = 1e15
"""Of microseconds: thirty years; and of all that is counted."""


class Span(NamedTuple):
    """A range that was recorded."""

    rank: int
    name: str
    begin_ms: float
    end_ms: float
    step: int | None


def read(file: str) -> list[Span]:
    """All ranges in `file`; raises `UsageError`."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    try:
        return spans_of(json.loads(text)["traceEvents"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is no timeline of commrt train --trace: {error!r:.200}") from error


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The ranges among `events`, of Chrome's format; KeyError or TypeError for something else."""
    return [_span(event) for event in events if event["ph"] == "X"]


def _span(event: dict[str, Any]) -> Span:
    args = event["args"]
    if not isinstance(args, dict):
        raise TypeError("args must be an object")
    step = args.get("step")
    if not (isinstance(event["name"], str) and _is_count(event["pid"]) and (step is None or _is_count(step))):
        raise TypeError("name must be a text, and pid and step must be whole numbers from 0 on")
    begin_ms = _ms(event["ts"])
    return Span(event["pid"], event["name"], begin_ms, begin_ms + _ms(event["dur"]), step)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _ms(time_us: object) -> float:
    if isinstance(time_us, bool) or not isinstance(time_us, int | float) or not 0 <= time_us < MOST:
        raise TypeError(f"ts and dur must be microseconds from 0 to {MOST:g}")
    return time_us / 1e3


def computing_s(spans: Sequence[Span]) -> list[list[float]]:
    """[passes, ranks]: from the begin of each forward pass to the end of its backward pass, without what was waited.

    Of as many passes as all ranks have made; the first do not count.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    began_ms = dict[int, float]()
    for span in sorted(spans, key=lambda span: (span.end_ms, -span.begin_ms)):  # what is inside first
        if span.name == "forward":
            began_ms[span.rank] = span.begin_ms
        elif span.rank in began_ms and span.name == "wait":
            began_ms[span.rank] += span.end_ms - span.begin_ms
        elif span.rank in began_ms and span.name == "backward":
            by_rank[span.rank].append((span.end_ms - began_ms.pop(span.rank)) / 1e3)
    return [list(step) for step in zip(*(by_rank[rank][WARM_STEPS:] for rank in sorted(by_rank)), strict=False)]
