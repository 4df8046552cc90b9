# SPDX-License-Identifier: Apache-2.0
"""Stragglers: how many ranks a step should wait for, and what waiting for fewer costs.

With a smaller quorum a step ends sooner, and its update is worth less. J. Chen et al., "Revisiting
Distributed Synchronous SGD" (2016), choose the quorum that makes the mean time of a step times the
number of updates smallest. Numbers of that paper are given from memory. Pure functions, but that
`choose` draws from the generator that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from commrt.backup_workers.policy import BackupWorkers
from commrt.errors import UsageError
from commrt.tools.planning.computing_times import Times

PerRank = NDArray[np.float64]
"""[ranks]: for a quorum of 1, 2, ... ranks."""
PUBLISHED = {50: 137.5e3, 100: 76.2e3}
"""Gradients per update -> updates until Inception converged, 6 backups: published, from memory."""
RESAMPLES = 100


def kth_time_s(times_s: Times) -> PerRank:
    """Return the mean time of the k-th gradient of a step, for k = 1, 2, ... ranks.

    >>> kth_time_s(np.array([[3.0, 1.0], [1.0, 5.0]])).tolist()
    [1.0, 4.0]
    """
    mean: PerRank = np.sort(times_s, axis=1).mean(axis=0)
    return mean


def step_time_s(times_s: Times, needed: ArrayLike) -> PerRank:
    """Return the mean time of a step by quorum size in `needed`; late ranks are not interrupted.

    A late rank finishes the gradient that is no longer needed, then begins one for the step that
    the others are at; it may miss several steps. `kth_time_s`, the published way, lets all ranks
    begin every step together.

    >>> step_time_s(np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]]), [1, 2]).tolist()
    [1.0, 3.0]
    """
    last = np.atleast_1d(np.asarray(needed))[:, None] - 1
    free_s = np.zeros((len(last), times_s.shape[1]))
    now_s = np.zeros((len(last), 1))
    for step_s in times_s:
        begin_s = np.maximum(free_s, now_s)
        ready_s = begin_s + step_s
        now_s = np.take_along_axis(np.sort(ready_s, axis=1), last, axis=1)
        free_s = np.where(begin_s < now_s, ready_s, begin_s)
    mean: PerRank = now_s[:, 0] / len(times_s)
    return mean


@dataclass(frozen=True, slots=True)
class Published:
    """The paper's updates for Inception: known at 50 and 100 gradients per update, a line between.

    >>> Published().iterations(np.array([50, 96, 100])).tolist()
    [137500.0, 81104.0, 76200.0]
    """

    def iterations(self, needed: NDArray[np.int64]) -> PerRank:
        """Return the updates by gradients per update; nan below 50 and above 100."""
        return np.interp(needed, [*PUBLISHED], [*PUBLISHED.values()], left=np.nan, right=np.nan)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Updates fall as a power of gradients per update: 1 if twice the batch halves them, 0 if not.

    >>> Scaling(0.5).iterations(np.array([1, 4])).tolist()
    [1.0, 0.5]
    """

    exponent: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise UsageError(
                f"an exponent of {self.exponent:g}: give one between 0, where more gradients per"
                " update do not help, and 1, where twice as many halve the updates"
            )

    def iterations(self, needed: NDArray[np.int64]) -> PerRank:
        """Return the updates until the goal, relative to those with one gradient per update."""
        return needed.astype(np.float64) ** -self.exponent


Goal = Published | Scaling
"""How many updates training needs, by gradients per update."""


@dataclass(frozen=True, slots=True, eq=False)
class QuorumChoice:
    """The quorum that reaches the goal soonest, and what it was chosen from."""

    kth_s: PerRank
    """Mean time of the k-th gradient of a step."""
    goal_s: PerRank
    """Time to the goal if the k-th gradient ends each step; nan where unknown.

    In seconds if the goal is in updates.
    """
    best: int
    """Gradients that a step should wait for."""
    likely: tuple[int, int]
    """Range of the best quorum in 90 % of resamplings of the steps."""


def choose(times_s: Times, goal: Goal, rng: Generator) -> QuorumChoice:
    """Return the quorum of least time to the goal; `rng` resamples whole steps for `likely`."""
    steps, ranks = times_s.shape
    iterations = goal.iterations(np.arange(1, ranks + 1))
    arrivals_s = np.sort(times_s, axis=1)
    kth_s = kth_time_s(times_s)
    drawn = (arrivals_s[rng.integers(steps, size=steps)] for _ in range(RESAMPLES))
    again = sorted(_best(each.mean(axis=0) * iterations) for each in drawn)
    likely = again[RESAMPLES // 20], again[-RESAMPLES // 20]
    goal_s = kth_s * iterations
    return QuorumChoice(kth_s, goal_s, _best(goal_s), likely)


def _best(goal_s: PerRank) -> int:
    """Return the quorum of least time; of equal ones the largest: its gradients cost nothing."""
    return len(goal_s) - int(np.nanargmin(goal_s[::-1]))


class BackupCost(NamedTuple):
    """What slow ranks cost a step that waits for all but `backups` of them."""

    backups: int = 0
    slower: float = 1.0
    """Time that the step computes, relative to a rank that is never slow."""
    updates: float = 1.0
    """Updates that training needs, relative to waiting for all ranks."""


def backup_costs(times_s: Times, goal: Goal, backups: Iterable[int]) -> list[BackupCost]:
    """Return the cost of each number of `backups`; late ranks finish, as in `step_time_s`.

    Raises `UsageError` for more than backup workers may have, and where `goal` is not known.
    """
    ranks = times_s.shape[1]
    needed = np.array([BackupWorkers(number).needed(ranks) for number in backups])
    updates = goal.iterations(needed) / goal.iterations(np.array([ranks]))
    if np.isnan(updates).any():
        fewest = needed[np.isnan(updates)].min()
        raise UsageError(
            f"no count of updates is known for {fewest} gradients: give fewer backups, or"
            " --exponent"
        )
    slower = step_time_s(times_s, needed) / float(np.median(times_s))
    return [
        BackupCost(backups=ranks - int(quorum), slower=float(factor), updates=float(more))
        for quorum, factor, more in zip(needed, slower, updates, strict=True)
    ]
