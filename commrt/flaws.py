# SPDX-License-Identifier: Apache-2.0
"""What a transfer cannot be, whatever the schedule is for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commrt.errors import ScheduleError
from commrt.schedule import COPY, MIX, Schedule, Step

__all__ = ["flaws", "require_sound"]


def flaws(step: Step, ranks: int, chunks: int) -> Iterator[tuple[Step, str]]:
    """What no schedule of so many `ranks` and `chunks` can do: for each kind the first transfer, and what is wrong."""
    for ok, what in (
        (
            (np.minimum(step.src, step.dst) >= 0) & (np.maximum(step.src, step.dst) < ranks),
            f"names a rank outside 0..{ranks - 1}",
        ),
        (
            (step.lo >= 0) & (step.lo <= step.hi) & (step.hi <= chunks),
            f"carries chunks outside 0..{chunks - 1} or a range that ends before it starts",
        ),
        (step.src != step.dst, "is from a rank to itself; leave it out"),
        ((step.combine >= COPY) & (step.combine <= MIX), "has an unknown way to combine"),
        (np.isfinite(step.weight) | (step.combine != MIX), "mixes with a weight that is no number"),
    ):
        if not ok.all():
            yield step.rows(np.flatnonzero(~ok)[:1]), what


def require_sound(step: Step, schedule: Schedule) -> Step:
    """`step`, of `schedule`; raises `ScheduleError` for a transfer of ranks or chunks that there are not."""
    for at, what in flaws(step, schedule.ranks, schedule.chunks):
        if not what.startswith("is from a rank to itself"):
            raise ScheduleError(f"{schedule.name} cannot run: the transfer {at.text()} {what}")
    return step
