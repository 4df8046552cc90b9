# SPDX-License-Identifier: Apache-2.0
"""A schedule as the runtime needs it: made for these ranks, with its traits, cut to fit a row.

Pure functions, for any thread.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.kernels.layout import GRANULE
from commrt.program import chunk_bounds
from commrt.schedule import Schedule

SCHEDULES_KEPT = 16
"""Schedules whose traits are remembered."""


class Traits(NamedTuple):
    """What a comparison needs of a schedule."""

    digest: str
    ranks: tuple[int, ...]
    """Ranks that send or receive."""
    combines: frozenset[int]


@lru_cache(SCHEDULES_KEPT)
def traits_of(schedule: Schedule) -> Traits:
    """Return the traits of `schedule`.

    They are remembered by object, which is kept alive meanwhile.
    """
    ranks: set[int] = set()
    combines: set[int] = set()
    for step in schedule.checked_steps():
        moved = step.canonical()
        ranks.update(chain(moved.src.tolist(), moved.dst.tolist()))
        combines.update(moved.combine.tolist())
    return Traits(schedule.digest(), tuple(sorted(ranks)), frozenset(combines))


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return the bounds of the chunks of `row`, which are equal if it divides."""
    return chunk_bounds(
        row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1
    )


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if not of `ranks`."""
    schedule = algorithm.schedule(step, ranks)
    if not isinstance(schedule, Schedule) or schedule.ranks != ranks:
        raise UsageError(
            f"{algorithm} made {schedule!r:.80} for {ranks} ranks, which is no schedule of them"
        )
    return schedule
