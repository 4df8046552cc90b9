# SPDX-License-Identifier: Apache-2.0
"""Times to a target loss: steps times the time of a step, and which of them is certainly the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from convergence import Steps

__all__ = ["TimeToTarget", "Verdict"]


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """The time that one method on so many ranks needs to the target."""

    method: str
    algorithm: str
    """What averages gradients or weights."""
    ranks: int
    steps: Steps
    step_s: float

    @property
    def seconds(self) -> float:
        """The most likely time."""
        return self.steps.steps * self.step_s

    @property
    def low_s(self) -> float:
        """The lower end of the interval."""
        return self.steps.low * self.step_s

    @property
    def high_s(self) -> float:
        """The upper end of the interval."""
        return self.steps.high * self.step_s

    def overlaps(self, other: TimeToTarget) -> bool:
        """Return whether the intervals of time have a number in common."""
        return self.low_s <= other.high_s and other.low_s <= self.high_s


@dataclass(frozen=True)
class Verdict:
    """What can be said of `times`, of which there must be one at least."""

    times: Sequence[TimeToTarget]

    @cached_property
    def least(self) -> TimeToTarget:
        """The least time, by its most likely value; of equal ones that of fewer ranks."""
        return min(self.times, key=lambda each: (each.seconds, each.ranks))

    @cached_property
    def close(self) -> list[TimeToTarget]:
        """The least time, and those whose intervals overlap its interval, the most likely first."""
        found = [each for each in self.times if each is self.least or each.overlaps(self.least)]
        return sorted(found, key=lambda each: (each.seconds, each.ranks))

    @property
    def method(self) -> str | None:
        """The method with the least time; None if another one could be as fast, or too little is known."""
        is_open = self.least.high_s == inf or any(each.method != self.least.method for each in self.close)
        return None if is_open or self.uncompared else self.least.method

    @property
    def uncompared(self) -> list[str]:
        """Methods of which nothing is known on the number of ranks of the least time."""
        there = {each.method for each in self.times if each.ranks == self.least.ranks}
        return sorted({each.method for each in self.times} - there)

    @property
    def winner(self) -> TimeToTarget | None:
        """The least time; None if its interval overlaps another one, even of its own method."""
        return self.least if self.method is not None and len(self.close) == 1 else None

    @property
    def fewest_ranks(self) -> TimeToTarget:
        """Of the times that cannot be told apart from the least, and overlap no other method, that of fewest ranks."""
        return min((each for each in self.close if not self._is_open(each)), key=lambda each: each.ranks)

    def _is_open(self, time: TimeToTarget) -> bool:
        return time is not self.least and any(o.method != time.method and o.overlaps(time) for o in self.times)

    @property
    def deciding_ranks(self) -> int | None:
        """The rank count whose curves would tell times apart; None if there is a winner, or all are recorded."""
        undecided = () if self.winner else self.close
        return max((each.ranks for each in undecided if not each.steps.is_recorded), default=None)
