# SPDX-License-Identifier: Apache-2.0
"""The text of `Replica.report`: where a rank's time went, and who comes last or was dropped.

Pure functions on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from commrt.store.live import Record
from commrt.training.step_report import Stats

ASK = "Start the job with COMMRT_LIVE=1 to see here which rank comes last."
MOST_SHOWN = 8
"""Ranks that are named."""
SLOW_SHARE = 0.1
"""Of the time of a step: what others wait longer than the rank that comes last."""


def table_of(
    title: str,
    stats: Stats,
    passed_s: float,
    records: Sequence[Record],
    dropped: Mapping[int, int] | None = None,
    history: Sequence[str] = (),
) -> str:
    """Return a table of `stats` since attach, `passed_s` ago; `records` are of all ranks, if any.

    Where gradients may be dropped, `dropped` has the steps that did not count them, by rank.
    `history` says which ranks were lost and replaced, of which the latest are shown.

    >>> print(table_of("rank 0 of 2", Stats(10, 2.0, 1.5, 4_000_000), 6.0, []))
    rank 0 of 2: 10 steps in 6 s, 1.67 steps/s
    where time went                          s    share   ms/step
    loop: forward, backward, ...           4.5     75 %       450
    exposed: waits for exchanges           1.5     25 %       150
    hidden: exchanges meanwhile            0.5      8 %        50
    sent 0.4 MB per step
    Start the job with COMMRT_LIVE=1 to see here which rank comes last.
    """
    steps = max(stats.steps, 1)
    passed_s = max(passed_s, 1e-9)
    rows = (
        ("loop: forward, backward, ...", passed_s - stats.exposed_s),
        ("exposed: waits for exchanges", stats.exposed_s),
        ("hidden: exchanges meanwhile", max(stats.comm_s - stats.exposed_s, 0.0)),
    )
    lines = [
        f"{title}: {stats.steps} steps in {passed_s:.3g} s, {stats.steps / passed_s:.3g} steps/s",
        f"{'where time went':<32}{'s':>10}{'share':>9}{'ms/step':>10}",
    ]
    for name, spent_s in rows:
        share = f"{100 * spent_s / passed_s:.0f} %"
        lines.append(f"{name:<32}{spent_s:>10.3g}{share:>9}{1e3 * spent_s / steps:>10.3g}")
    lines += [
        f"sent {stats.nbytes_sent / 1e6 / steps:.3g} MB per step",
        _last_of(records, passed_s) if dropped is None else _dropped_of(dropped, stats.steps),
    ]
    if history:
        earlier = f"{len(history) - MOST_SHOWN} earlier ones; " if len(history) > MOST_SHOWN else ""
        lines.append(f"losses and replacements: {earlier}{'; '.join(history[-MOST_SHOWN:])}")
    return "\n".join(lines)


def _dropped_of(dropped: Mapping[int, int], steps: int) -> str:
    """Return whose gradients were dropped, the rank with the most first.

    >>> _dropped_of({1: 2, 3: 12}, steps=100)
    'gradients dropped, of 100 steps: of rank 3 in 12, of rank 1 in 2'
    """
    most = sorted(dropped, key=lambda rank: (-dropped[rank], rank))
    ranks = ", ".join(f"of rank {rank} in {dropped[rank]}" for rank in most[:MOST_SHOWN])
    more = f", and of {len(most) - MOST_SHOWN} more ranks" if len(most) > MOST_SHOWN else ""
    return f"gradients dropped, of {steps} steps: {ranks or 'none'}{more}"


def _last_of(records: Sequence[Record], passed_s: float) -> str:
    """Return which rank waits least, so that the others wait for it."""
    waits = {each.rank: each.exposed_s / each.steps for each in records if each.steps}
    if len(waits) < 2:
        return ASK
    last = min(waits, key=lambda rank: waits[rank])
    others_s = median(wait for rank, wait in waits.items() if rank != last)
    own = next(each for each in records if each.rank == last)
    if others_s - waits[last] < SLOW_SHARE * passed_s / own.steps:
        return "no rank comes later than the others"
    times = f"it waits {1e3 * waits[last]:.3g} ms per step, the others {1e3 * others_s:.3g} ms"
    return f"late: rank {last} on {own.host}: {times}"
