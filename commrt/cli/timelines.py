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
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    try:
        return spans_of(json.loads(text)["traceEvents"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no timeline of commrt train --trace: {error!r}") from error


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The ranges among `events`, of Chrome's format; KeyError or TypeError for something else."""
    return [_span(event) for event in events if event["ph"] == "X"]


def _span(event: dict[str, Any]) -> Span:
    begin_ms = event["ts"] / 1e3
    return Span(event["pid"], event["name"], begin_ms, begin_ms + event["dur"] / 1e3, event["args"].get("step"))


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
