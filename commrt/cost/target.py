# SPDX-License-Identifier: Apache-2.0
"""Times to a target loss: steps times the time of a step, and which of them is certainly the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from commrt.cost.convergence import Steps

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
    def alike(self) -> list[TimeToTarget]:
        """Times whose intervals overlap that of the least, without it."""
        return [each for each in self.times if each is not self.least and each.overlaps(self.least)]

    @property
    def winner(self) -> TimeToTarget | None:
        """The least time; None if a time of another method could be less, or nothing is known of its spread."""
        is_open = self.least.high_s == inf or any(each.method != self.least.method for each in self.alike)
        return None if is_open else self.least

    @property
    def undecided(self) -> list[TimeToTarget]:
        """The times that cannot be told apart, the most likely first; empty if there is a winner."""
        if self.winner is not None:
            return []
        return sorted([self.least, *self.alike], key=lambda each: each.seconds)

    @property
    def deciding_ranks(self) -> int | None:
        """The rank count whose curves would tell the undecided apart; None if all of these are recorded."""
        return max((each.ranks for each in self.undecided if not each.steps.is_recorded), default=None)
