# SPDX-License-Identifier: Apache-2.0
"""Any algorithm on slices of the buffer: one is combined while the next one is transferred.

A pure function of schedules, and the class of it that users wrap around another algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import require_inner, require_whole
from commrt.algorithms.torus import Torus2D
from commrt.errors import ScheduleError
from commrt.schedule import Schedule, Step, require_schedule

MAX_SLICES = 1 << 16


@dataclass(frozen=True, slots=True)
class Sliced:
    """Run `inner` on each of `slices` parts of the buffer; see `in_slices`.

    The extra steps pay if combining takes about as long as a transfer: large buckets on fast links.
    Only GPUs do both at once. Raises `UsageError` for less than one slice.

    >>> print(Sliced(Torus2D(), slices=2).schedule(0, 2))
    torus 2x1 in 2 slices: 2 ranks, 4 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  add  0->1 [3:4)  1->0 [2:3)
      2  copy  0->1 [0:1)  1->0 [1:2)
      3  copy  0->1 [2:3)  1->0 [3:4)
    """

    inner: Algorithm = field(default_factory=Torus2D)
    slices: int = 2

    def __post_init__(self) -> None:
        require_whole("slices", self.slices, most=MAX_SLICES)
        require_inner(self.inner)

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the inner algorithm's schedule in slices."""
        return in_slices(self.inner.schedule(step, ranks), self.slices)


@lru_cache  # one object for equal arguments, as proofs and programs are cached by it
def in_slices(schedule: Schedule, slices: int) -> Schedule:
    """Return `schedule` on each of `slices` equal parts of the buffer, a step of each in turn.

    Cost: `slices` times the steps, the same bytes.
    """
    require_schedule(schedule)
    if slices < 1:
        raise ScheduleError(
            f"{schedule.name} cannot be cut into {slices} slices: 1 leaves it whole"
        )
    total = schedule.chunks * slices
    parts = [
        schedule.within(lo, lo + schedule.chunks, total) for lo in range(0, total, schedule.chunks)
    ]

    def steps() -> Iterator[Step]:
        return chain.from_iterable(zip(*(part.steps() for part in parts), strict=True))

    return Schedule(f"{schedule.name} in {slices} slices", schedule.ranks, total, steps)
