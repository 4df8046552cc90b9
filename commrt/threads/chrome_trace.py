# SPDX-License-Identifier: Apache-2.0
"""Recorded timelines as files for Chrome and Perfetto, and those of all ranks in one; no torch.

Reads and writes files of one directory only, on the thread that asks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from commrt.errors import UsageError

MERGED = "trace.json"


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


def write_rank(directory: Path, trace: dict[str, Any], rank: int) -> None:
    """Write the `trace` of `rank` to `directory`, and then all that ranks have written there."""
    _replace(directory / f"rank{rank}.json", trace)
    merge(directory)


def merge(directory: Path) -> Path:
    """Merge the ranks' files in `directory` into one trace there, and return its path.

    Times of other hosts are moved to the clock of the first rank's host, as far as their clocks
    agree. Raises `UsageError` if a file is missing or malformed.
    """
    merged: list[Path] = []
    try:
        while (files := sorted(directory.glob("rank*.json"), key=_rank_of)) != merged:
            merged = files  # a rank that writes meanwhile may have read less
            traces = [json.loads(file.read_text(encoding="utf-8")) for file in files]
            events = [event for trace in traces for event in _moved(trace, traces[0])]
            _replace(directory / MERGED, {"displayTimeUnit": "ms", "traceEvents": events})
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"{directory!s:.200} holds no traces of COMMRT_TRACE: {error!r:.200}"
        raise UsageError(what) from error
    if not merged:
        raise UsageError(
            f"{directory!s:.200} holds no rank0.json: give the directory of COMMRT_TRACE"
        )
    return directory / MERGED


def _moved(trace: dict[str, Any], first: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of `trace` by the clock of `first`."""
    own = trace["otherData"]
    other = first["otherData"]
    move_us = 0.0 if own["host"] == other["host"] else 1e6 * (own["clock_s"] - other["clock_s"])
    return [
        event | {"ts": round(event["ts"] + move_us, 3)} if "ts" in event else event
        for event in trace["traceEvents"]
    ]


def _rank_of(file: Path) -> int:
    digits = file.stem.removeprefix("rank")
    return int(digits) if digits.isdigit() else 0


def _replace(file: Path, trace: dict[str, Any]) -> None:
    """Write `trace` to `file`, which others see whole or not at all."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(trace), encoding="utf-8")
    part.replace(file)
