# SPDX-License-Identifier: Apache-2.0
"""How many of all ranks a step should wait for: fewer end it sooner, and make it worth less.

J. Chen et al. (2016) choose the split that makes the mean time of a step times the number of updates smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from commrt.errors import UsageError
from commrt.pricing.stragglers import Recorded, Times

__all__ = ["Choice", "Goal", "PerRank", "Published", "Scaling", "choose"]

PUBLISHED = {50: 137.5e3, 100: 76.2e3}
"""Gradients per update -> updates until Inception converged: published, as recalled; with 6 backups. Not ours."""
RESAMPLES = 100

PerRank = NDArray[np.float64]
"""[ranks]: for 1, 2, ... gradients per update."""


class Goal(Protocol):
    """How many updates training needs."""

    in_updates: ClassVar[bool]
    """Whether `iterations` counts updates; else only how they compare is known."""

    def iterations(self, needed: NDArray[np.int64]) -> PerRank:
        """Updates until the goal, for so many gradients per update; nan where that is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """The paper's own counts for Inception, as recalled: known at 50 and 100 gradients per update, guessed between.

    >>> Published().iterations(np.array([50, 96, 100])).tolist()
    [137500.0, 81104.0, 76200.0]
    """

    power_law: bool = False
    """Guess by a power law; else linearly, as the paper does."""
    in_updates: ClassVar[bool] = True

    def iterations(self, needed: NDArray[np.int64]) -> PerRank:
        """Updates until the goal; nan below 50 and above 100."""
        gradients, updates = np.array([*PUBLISHED], dtype=np.float64), np.array([*PUBLISHED.values()])
        if self.power_law:
            between = np.exp(np.interp(np.log(needed), np.log(gradients), np.log(updates)))
        else:
            between = np.interp(needed, gradients, updates)
        is_between = (needed >= gradients[0]) & (needed <= gradients[-1])
        return np.where(is_between, between, np.nan).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Updates fall with the gradients of each as a power: 1 if twice the batch halves them, 0 if it does not help.

    >>> Scaling(0.5).iterations(np.array([1, 4])).tolist()
    [1.0, 0.5]
    """

    exponent: float = 1.0
    in_updates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise UsageError(
                f"an exponent of {self.exponent:g}: give one between 0, where more gradients per update do not help, "
                "and 1, where twice as many halve the updates"
            )

    def iterations(self, needed: NDArray[np.int64]) -> PerRank:
        """Updates until the goal, compared with those for one gradient each."""
        return needed.astype(np.float64) ** -self.exponent


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The split that reaches the goal soonest, and what it was chosen from."""

    kth_s: PerRank
    """Mean time of the k-th gradient of a step."""
    goal_s: PerRank
    """Time to the goal if the k-th gradient ends each step; nan where unknown. Seconds if the goal is in updates."""
    best: int
    """Gradients a step should wait for."""
    likely: tuple[int, int]
    """Between which the best is in 90 % of resamplings of the steps."""
    bound_s: float
    """No quorum is faster on these steps, not even one chosen for each of them with hindsight."""


def choose(times_s: Times, goal: Goal, rng: Generator) -> Choice:
    """Weigh every quorum against the time it takes to the goal; `rng` draws the steps again for `likely`."""
    steps, ranks = times_s.shape
    iterations = goal.iterations(np.arange(1, ranks + 1))
    if np.isnan(iterations).all():
        raise UsageError(f"nothing is known of the updates that {ranks} ranks or fewer need: give an exponent")
    arrivals = Recorded(np.sort(times_s, axis=1))
    kth_s = arrivals.times_s.mean(axis=0)
    again = [_best(arrivals.sample(rng, steps, ranks).mean(axis=0) * iterations) for _ in range(RESAMPLES)]
    low, high = sorted(again)[RESAMPLES // 20], sorted(again)[-RESAMPLES // 20]
    goal_s = kth_s * iterations
    return Choice(kth_s, goal_s, _best(goal_s), (low, high), _with_hindsight(arrivals.times_s, iterations))


def _best(goal_s: PerRank) -> int:
    """Of equals the largest: a gradient that costs no time is not thrown away."""
    return len(goal_s) - int(np.nanargmin(goal_s[::-1]))


def _with_hindsight(arrivals_s: Times, iterations: PerRank) -> float:
    """The least time per goal if each step may end with any gradient; an update is worth 1 / iterations of the goal.

    W. Dinkelbach (1967): at the right price of the goal the best that all steps can do together is to break even.
    """
    known = ~np.isnan(iterations)
    arrivals_s, worth = arrivals_s[:, known], 1 / iterations[known]
    price_s = inf
    better_s = float((arrivals_s.mean(axis=0) / worth).min())
    while better_s < price_s * (1 - 1e-12):
        price_s = better_s
        ends = (arrivals_s - price_s * worth).argmin(axis=1)
        better_s = float(arrivals_s[np.arange(len(ends)), ends].sum() / worth[ends].sum())
    return price_s
