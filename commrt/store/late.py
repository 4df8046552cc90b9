# SPDX-License-Identifier: Apache-2.0
"""Who is late in a running job, from what its ranks tell of themselves. Sends and writes nothing.

For one thread, which looks about once per second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Literal, NamedTuple

from commrt.store.live import PERIOD_S, Record, lost_of

STALLED_S = 2 * PERIOD_S
"""So long a rank has made no step before others wait for it."""
SILENT_S = 5 * PERIOD_S
"""So long a rank has written nothing before it counts as silent."""
SLOW_SHARE = 0.1
"""Of the time of a step: what others wait longer than a slow rank."""
SLOW_LOOKS = 3
"""So often in a row a rank must be the slow one."""
AGAIN_S = 10.0
"""After which the same finding is told again."""
MOST_TOLD = 8
"""Findings of one look that are told."""


class Late(NamedTuple):
    """One rank for which others wait."""

    what: Literal["stalled", "slow", "silent"]
    """The others wait in a step for a rank that computes; it comes late in each step; or it writes
    no records any more."""
    rank: int
    host: str
    step: int
    bucket: int | None
    """The bucket that waits for it, if one does."""
    late_s: float
    """Seconds: since its latest step, in each step, or since its latest record."""
    since: str
    """The time in UTC."""
    seen_by: tuple[int, ...]
    """The ranks that wait."""


class LateWatch:
    """Finds late ranks by comparing the records of two looks; `news` says which ones to tell."""

    def __init__(self) -> None:
        self._before: Mapping[int, Record] = {}
        # by rank, the number of its latest record, and when that came
        self._heard: dict[int, tuple[int, float]] = {}
        self._slow: list[tuple[int, float]] = []  # ranks of the latest looks, and when
        self._told: dict[tuple[str, int], float] = {}  # when a finding was told last

    def look(self, records: Sequence[Record], now_s: float) -> list[Late]:
        """Return who is late; `now_s` is this process's clock, in seconds since 1970."""
        lost = lost_of(records)
        running = [each for each in records if not each.closed and each.rank not in lost]
        silent = [*self._silent(running, now_s)]
        alive = [each for each in running if each.rank not in {late.rank for late in silent}]
        waiting = [each for each in alive if each.bucket is not None and _stalls(each)]
        seen_by = tuple([each.rank for each in waiting])
        found = [
            late._replace(bucket=waiting[0].bucket if waiting else None, seen_by=seen_by)
            for late in silent
        ]
        for each in alive:
            if waiting and each.bucket is None and _stalls(each) and each.step <= waiting[0].step:
                late = _late("stalled", each, each.time_s - each.since_s, each.since_s)
                found.append(late._replace(bucket=waiting[0].bucket, seen_by=seen_by))
        if not found:
            found += self._slow_one(alive, now_s)
        self._before = {record.rank: record for record in records}
        return found

    def news(self, found: Sequence[Late], now_s: float) -> list[Late]:
        """Return those `found` that were not told within `AGAIN_S`, at most `MOST_TOLD`."""
        news = list[Late]()
        for late in found:
            key = (late.what, late.rank)
            if now_s - self._told.get(key, -AGAIN_S) >= AGAIN_S and len(news) < MOST_TOLD:
                self._told[key] = now_s
                news.append(late)
        return news

    def _silent(self, running: Sequence[Record], now_s: float) -> Iterator[Late]:
        """Note which records are new, and yield the ranks that have written none for too long."""
        for each in running:
            number, heard_s = self._heard.get(each.rank, (-1, now_s))
            if number != each.number:
                self._heard[each.rank] = (each.number, now_s)
            elif now_s - heard_s >= SILENT_S:
                yield _late("silent", each, now_s - heard_s, heard_s)

    def _slow_one(self, alive: Sequence[Record], now_s: float) -> Iterator[Late]:
        """Note which rank waits less than the others; yield it if it does so again and again."""
        waits = {}
        step_s = 0.0
        for each in alive:
            before = self._before.get(each.rank)
            if before is not None and each.steps > before.steps:
                steps = each.steps - before.steps
                waits[each.rank] = (each.exposed_s - before.exposed_s) / steps
                step_s = (each.time_s - before.time_s) / steps
        if len(waits) < 2:
            return
        rank = min(waits, key=lambda one: waits[one])
        others = [wait for other, wait in waits.items() if other != rank]
        late_s = median(others) - waits[rank]
        if late_s < SLOW_SHARE * step_s:
            self._slow.clear()
            return
        if self._slow and self._slow[-1][0] != rank:
            self._slow.clear()
        self._slow.append((rank, now_s))
        if len(self._slow) >= SLOW_LOOKS:
            own = next(each for each in alive if each.rank == rank)
            seen_by = tuple([other for other in waits if other != rank])
            yield _late("slow", own, late_s, self._slow[0][1])._replace(seen_by=seen_by)


def _stalls(record: Record) -> bool:
    return record.time_s - record.since_s >= STALLED_S


def _late(
    what: Literal["stalled", "slow", "silent"], record: Record, late_s: float, since_s: float
) -> Late:
    """Return that the rank of `record` is late; no bucket and no rank waits for it so far."""
    since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="seconds")
    return Late(
        what, record.rank, record.host, record.step, None, late_s=late_s, since=since, seen_by=()
    )
