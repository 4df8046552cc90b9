# SPDX-License-Identifier: Apache-2.0
"""Traits of a schedule, by which ranks compare what they run; remembered for the latest ones.

For any thread.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from commrt.schedule import Schedule

SCHEDULES_KEPT = 16
"""Schedules whose traits are remembered."""


class Traits(NamedTuple):
    """What is looked at before a schedule runs for the first time."""

    digest: str
    ranks: tuple[int, ...]
    """Ranks that send or receive."""
    combines: frozenset[int]
    """What its receivers do: COPY, ADD, MIX."""


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
