# SPDX-License-Identifier: Apache-2.0
"""How many steps training needs to a target loss: read from recorded curves, and predicted for more ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import ceil, exp, inf, isfinite, log, log2, nan, sqrt

import numpy as np
from curve import Curve, Losses
from lasso import LossPoints, chosen_penalty, fit_losses

from commrt.errors import UsageError

__all__ = ["FAMILIES", "Convergence", "Run", "Steps", "convergence_of", "smoothed", "steps_to"]

WINDOW = 1.25
"""The loss of step i is averaged over steps i/WINDOW to i*WINDOW."""
POINTS, HIGHEST = 40, 4.0
"""Points of a run that the Lasso fits, and their highest loss, in targets."""
LEVELS, FEWEST_STEPS = (1.0, 1.5, 2.0), 10
"""Losses at which families are compared, in targets; those above the target only if no run meets them too soon."""
FEWEST_COUNTS = 3
"""Rank counts of a prediction: two to fit, and one to test the fit."""
MOST_DOUBLINGS = 2
"""Of the largest recorded rank count."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Half the width of an interval of 95 %, in standard deviations estimated with 1, 2, ... degrees of freedom."""
MOST_LOG = 700.0
"""Wider intervals, in logarithms, would overflow."""
CLOSE = 2.0
"""Families whose errors are at most so many times the smallest are not told apart."""

Prediction = Callable[[float], float]
"""ranks -> steps to the target; nan if unknown."""
Fit = Callable[[Sequence["Run"], float], Prediction]
"""(runs, target) -> prediction"""


def smoothed(losses: Losses) -> Losses:
    """Return the mean loss around each step, from i/1.25 to 1.25 i, or to the last step.

    The window is a share of the steps so far. So it changes the steps to a target by the same share in quick and in
    slow runs. From the first loss on that is not finite, means are nan.

    >>> smoothed(np.array([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]))
    array([6. , 5. , 4. , 2.5, 2. , 1.5])
    """
    steps = np.arange(1, len(losses) + 1)
    begin = np.ceil(steps / WINDOW).astype(int) - 1
    end = np.minimum((steps * WINDOW).astype(int), len(losses))
    with np.errstate(invalid="ignore", over="ignore"):  # a run may end in infinite losses
        sums = np.concatenate([[0.0], np.cumsum(losses)])
        means = (sums[end] - sums[begin]) / (end - begin)
    return np.where(np.isfinite(means), means, np.nan)


def steps_to(losses: Losses, target: float) -> int | None:
    """Return the first step, counted from 1, whose `smoothed` loss is at most `target`; None if there is none."""
    reached = np.flatnonzero(smoothed(losses) <= target)
    return int(reached[0]) + 1 if len(reached) else None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What families fit of a recorded curve."""

    ranks: int
    steps: int
    """To the target."""
    points: LossPoints
    """Around the target."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to the target, and the interval in which they are likely."""

    steps: float
    low: float
    high: float
    is_recorded: bool

    def overlaps(self, other: Steps) -> bool:
        """Return whether the intervals have a number in common."""
        return self.low <= other.high and other.low <= self.high


def run_of(curve: Curve, target: float) -> Run | None:
    """Return the part of `curve` that matters for `target`; None if it does not get there."""
    steps = steps_to(curve.common_losses, target)
    if steps is None:
        return None
    losses = smoothed(curve.common_losses)
    begin = int(np.flatnonzero(losses <= HIGHEST * target)[0]) + 1
    end = min(ceil(steps * WINDOW), len(losses))
    chosen = np.unique(np.geomspace(begin, end, POINTS).round().astype(int))
    finite = chosen[np.isfinite(losses[chosen - 1])]
    positive = np.maximum(losses[finite - 1], target / HIGHEST)  # their logarithms are fitted
    return Run(curve.ranks, steps, LossPoints(curve.ranks, finite.astype(np.float64), positive))


def fit_floor(runs: Sequence[Run], _target: float) -> Prediction:
    """Fit ``S_min + E/B`` with both at least 0, by least squares of relative errors.

    All ranks have equal batches, so the number of ranks stands for the batch B.
    """
    table = np.array([[1 / run.steps, 1 / run.ranks / run.steps] for run in runs])
    candidates = [[float(found) for found in np.linalg.lstsq(table, np.ones(len(runs)), rcond=None)[0]]]
    candidates += [[float(table[:, 0].sum() / (table[:, 0] ** 2).sum()), 0.0]]
    candidates += [[0.0, float(table[:, 1].sum() / (table[:, 1] ** 2).sum())]]
    allowed = [each for each in candidates if min(each) >= 0]
    least, per_batch = min(allowed, key=lambda each: float(((table @ each - 1) ** 2).sum()))
    return lambda ranks: least + per_batch / ranks


def fit_power(runs: Sequence[Run], _target: float) -> Prediction:
    """Fit ``a B^-b`` by least squares of logarithms."""
    ranks, steps = (np.log([getattr(run, name) for run in runs]) for name in ("ranks", "steps"))
    slope, intercept = np.polyfit(ranks, steps, 1)
    return lambda count: exp(intercept + slope * log(count))


def fit_lasso(runs: Sequence[Run], target: float, penalty: float) -> Prediction:
    """Fit the log loss by a Lasso."""
    (model,) = fit_losses([run.points for run in runs], [penalty])
    return lambda ranks: model.steps_to(target, ranks)


def _lasso(runs: Sequence[Run]) -> Fit:
    return partial(fit_lasso, penalty=chosen_penalty([run.points for run in runs]))


FAMILIES: Mapping[str, Callable[[Sequence[Run]], Fit]] = {
    "S_min + E/B": lambda _: fit_floor,
    "power law": lambda _: fit_power,
    "Lasso": _lasso,
}
"""Ways to predict steps, by name: what to fit to runs like the given ones. The Lasso takes its penalty from these."""


def mean_log(runs: Sequence[Run], ranks: int) -> float:
    """Return the mean logarithm of the steps that runs with `ranks` needed."""
    return float(np.mean([log(run.steps) for run in runs if run.ranks == ranks]))


def deviation(runs: Sequence[Run], value: Callable[[Sequence[Run]], float]) -> float:
    """Return the standard deviation of ``value(runs)`` by a jackknife: runs are left out one at a time.

    Runs of each rank count are one sample. A rank count with a single run tells nothing about its spread; if all are
    such, it is infinite. If a value is not finite, neither is the deviation.
    """
    samples = [[run for run in runs if run.ranks == count] for count in {run.ranks for run in runs}]
    variance = inf if max(map(len, samples)) == 1 else 0.0
    for own in samples:
        if len(own) > 1:
            values = np.array([value([other for other in runs if other is not run]) for run in own])
            variance += (len(own) - 1) * float(values.var())
    return sqrt(variance) if isfinite(variance) else inf


def interval(value: float, spread: float, freedom: int) -> Steps:
    """Return recorded steps with logarithm `value`, which varies by the standard deviation `spread`.

    It was estimated with `freedom` degrees of freedom: runs, less one for each rank count.
    """
    half = spread * (STUDENT[freedom - 1] if 1 <= freedom <= len(STUDENT) else 1.96 + 2.6 / max(freedom, 1))
    return Steps(exp(value), exp(value - half), exp(value + half) if half < MOST_LOG else inf, is_recorded=True)


@dataclass(frozen=True, eq=False)
class Convergence:
    """The steps of one method to a target loss, by the number of ranks."""

    method: str
    target: float
    runs: Sequence[Run]
    levels: Mapping[float, Sequence[Run]]
    """The runs by the loss at which families are compared; the target is one of them."""

    @cached_property
    def recorded(self) -> list[int]:
        """Rank counts of the curves, in order."""
        return sorted({run.ranks for run in self.runs})

    @property
    def can_predict(self) -> bool:
        """Whether there are enough rank counts to fit, and to test the fit."""
        return len(self.recorded) >= FEWEST_COUNTS

    @cached_property
    def errors(self) -> dict[str, float]:
        """Error of each family for rank counts that were held out, each predicted from all smaller ones.

        It is the root of the mean square of log(predicted / recorded) per doubling, over counts and loss levels. Only
        larger counts are predicted from smaller ones, as a prediction goes beyond what is recorded.
        """
        return {name: self._error(family) for name, family in FAMILIES.items()} if self.can_predict else {}

    def _error(self, family: Callable[[Sequence[Run]], Fit]) -> float:
        squares = []
        for (level, runs), place in product(self.levels.items(), range(FEWEST_COUNTS - 1, len(self.recorded))):
            out, before = self.recorded[place], self.recorded[place - 1]
            rest = [run for run in runs if run.ranks < out]
            found = _log(family(rest)(rest, level)(out))
            squares.append(((found - mean_log(runs, out)) / log2(out / before)) ** 2)
        return sqrt(float(np.mean(squares))) if all(map(isfinite, squares)) else inf

    @property
    def family(self) -> str | None:
        """The family with the smallest error; None if there are too few rank counts to compare them."""
        return self.rivals[0] if self.can_predict else None

    @property
    def error(self) -> float:
        """The error of the family per doubling; nan if there is none."""
        return nan if self.family is None else self.errors[self.family]

    def steps(self, ranks: int) -> Steps:
        """Return the steps that `ranks` ranks need.

        Recorded counts are read from their runs, others are predicted. Raise `UsageError` for too few recorded rank
        counts, or for more than four times the largest of them.
        """
        if ranks in self.recorded:
            return interval(mean_log(self.runs, ranks), self._spread(ranks), self._freedom)
        self.require(ranks)
        names = self._by_error if len(self.recorded) == FEWEST_COUNTS else self.rivals  # one count proves little
        values = [self._log_steps(self.runs, ranks, family) for family in names]
        if not isfinite(values[0]):
            raise UsageError(f"{self.method}: no fit says when {ranks} ranks reach {self.target:g}: record their curve")
        doublings = min(abs(log2(ranks / count)) for count in self.recorded)
        sampled = deviation(self.runs, lambda runs: self._log_steps(runs, ranks, self.rivals[0]))
        found = interval(values[0], sqrt(sampled**2 + (doublings * self.error) ** 2), self._freedom)
        others = [exp(value) for value in values if isfinite(value)]
        return Steps(found.steps, min(found.low, *others), max(found.high, *others), is_recorded=False)

    def _spread(self, ranks: int) -> float:
        """Return the standard deviation of the mean log steps of a recorded count.

        Runs are taken to vary by the same share at all counts. If no count has two runs, it is infinite.
        """
        groups = [[log(run.steps) for run in self.runs if run.ranks == count] for count in self.recorded]
        squares, freedom = sum(len(group) * float(np.var(group)) for group in groups), self._freedom
        one = max(sqrt(squares / freedom), exp(-mean_log(self.runs, ranks))) if freedom else inf  # at least one step
        return one / sqrt(len(groups[self.recorded.index(ranks)]))

    @property
    def _freedom(self) -> int:
        """Degrees of freedom of the spread of seeds."""
        return len(self.runs) - len(self.recorded)

    def knows(self, ranks: int) -> bool:
        """Return whether the steps of `ranks` ranks can be read, or predicted from fewer ranks."""
        is_near = self.recorded[0] < ranks <= self.recorded[-1] * 2**MOST_DOUBLINGS
        return ranks in self.recorded or (self.can_predict and is_near)

    def require(self, ranks: int) -> None:
        """Raise `UsageError` if the steps of `ranks` ranks can be neither read nor predicted."""
        if ranks in self.recorded:
            return
        largest, counts = self.recorded[-1], ", ".join(map(str, self.recorded))
        if not self.can_predict:
            raise UsageError(
                f"{self.method}: curves of {counts} ranks say nothing of {ranks}: a prediction needs {FEWEST_COUNTS} "
                f"rank counts, two to fit and one to test the fit: record more, or give --ranks {largest}"
            )
        if ranks > largest * 2**MOST_DOUBLINGS:
            raise UsageError(
                f"{self.method}: {ranks} ranks are more than {MOST_DOUBLINGS} doublings of {largest}, the largest "
                f"recorded: record a curve with at least {ceil(ranks / 2**MOST_DOUBLINGS)} ranks"
            )

    @cached_property
    def rivals(self) -> list[str]:
        """Families that the held-out counts hardly tell from the best one, the best first."""
        names = self._by_error
        return [name for name in names if self.errors[name] <= CLOSE * self.errors[names[0]]]

    @property
    def _by_error(self) -> list[str]:
        return sorted(self.errors, key=self.errors.__getitem__)

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """What to fit to all runs, by the names of families."""
        return {name: family(self.runs) for name, family in FAMILIES.items()}

    def _log_steps(self, runs: Sequence[Run], ranks: int, family: str) -> float:
        return _log(self.fits[family](runs, self.target)(ranks))


def _log(steps: float) -> float:
    return log(steps) if steps > 0 else nan


def convergence_of(curves: Mapping[str, Curve], target: float) -> list[Convergence]:
    """Return how each method converges, for `curves` by the names of their files.

    Raise `UsageError` for batches that differ per rank, and for curves that do not reach `target`.
    """
    _require_equal_batches(curves)
    runs = {name: run_of(curve, target) for name, curve in curves.items()}
    for name, run in runs.items():
        if run is None:
            raise UsageError(_too_high(name, curves[name], target))
        if run.steps == 1:
            raise UsageError(f"{name} is below a loss of {target:g} from its first step on: give a lower --target-loss")
    return [_convergence(method, [c for c in curves.values() if c.method == method], target)
            for method in dict.fromkeys(curve.method for curve in curves.values())]  # fmt: skip


def _convergence(method: str, curves: Sequence[Curve], target: float) -> Convergence:
    levels = dict[float, Sequence[Run]]()
    for level in (share * target for share in LEVELS):
        runs = [run for run in (run_of(curve, level) for curve in curves) if run is not None]
        if level == target or min(run.steps for run in runs) >= FEWEST_STEPS:
            levels[level] = runs
    return Convergence(method, target, levels[target], levels)


def _too_high(name: str, curve: Curve, target: float) -> str:
    known = smoothed(curve.common_losses)
    known = known[np.isfinite(known)]
    lowest = f"{known.min():.3g}" if len(known) else "not finite"
    return (
        f"{name} ({curve.method}, {curve.ranks} ranks) does not reach a loss of {target:g}: its lowest is {lowest}, "
        "averaged over neighbouring steps; record more steps, or give a higher --target-loss"
    )


def _require_equal_batches(curves: Mapping[str, Curve]) -> None:
    (first, one), *others = curves.items()
    for name, other in others:
        if other.batch * one.ranks != one.batch * other.ranks:
            each = " and ".join(f"{c.batch / c.ranks:g} in {n}" for n, c in ((first, one), (name, other)))
            raise UsageError(
                f"samples of a rank in a step must be the same in all curves, but are {each}: record them with a batch "
                "that grows with the number of ranks"
            )
