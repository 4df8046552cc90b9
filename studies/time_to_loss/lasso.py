# SPDX-License-Identifier: Apache-2.0
"""A Lasso for the log loss of training, over features of the step and the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign

import numpy as np
from numpy.typing import NDArray

__all__ = ["PENALTIES", "LossModel", "LossPoints", "chosen_penalty", "fit_losses"]

Values = NDArray[np.float64]
"""[points], [features] or [features, features]"""

PENALTIES = tuple(float(share) for share in np.geomspace(0.3, 1e-4, 8))
"""Tried, as shares of the smallest penalty that leaves no feature."""
MOST_SWEEPS, TOLERANCE = 200, 1e-4
"""Of coordinate descent; the tolerance is of a log loss."""
GRID = 600
"""Steps at which a fitted loss is compared with a target."""


@dataclass(frozen=True, slots=True, eq=False)
class LossPoints:
    """Smoothed losses of one run at some of its steps."""

    ranks: int
    steps: Values
    """[points], counted from 1."""
    losses: Values
    """[points]"""


@dataclass(frozen=True, slots=True, eq=False)
class LossModel:
    """A fitted log loss, linear in the features."""

    weights: Values
    """[features], of features as they are."""
    intercept: float
    first: float
    """Steps are looked for from here on."""
    last: float

    def log_losses(self, steps: Values, ranks: float) -> Values:
        """Return the log loss after each of `steps`."""
        return np.asarray(self.intercept + features(steps, np.full(len(steps), float(ranks))) @ self.weights)

    def steps_to(self, target: float, ranks: float) -> float:
        """Return the first step with a loss of `target`; nan if the fitted loss does not fall through it."""
        steps = np.geomspace(self.first, self.last, GRID)
        above = self.log_losses(steps, ranks) - np.log(target)
        falls = np.flatnonzero((above[:-1] > 0) & (above[1:] <= 0))
        if not len(falls):
            return float("nan")
        begin = int(falls[0])
        share = above[begin] / (above[begin] - above[begin + 1])
        return float(steps[begin] * (steps[begin + 1] / steps[begin]) ** share)


def features(steps: Values, ranks: Values) -> Values:
    """Return [points, features]: functions of the step, of the ranks, and their products.

    Those of the ranks flatten out, since each further rank changes training less than the one before.
    """
    of_steps = np.stack([np.log(steps), np.sqrt(steps), steps], axis=1)
    of_ranks = np.stack([np.log(ranks), ranks**-0.5, 1 / ranks], axis=1)
    products = of_steps[:, :, None] * of_ranks[:, None, :]
    return np.concatenate([of_steps, of_ranks, products.reshape(len(steps), -1)], axis=1)


def fit_losses(runs: Sequence[LossPoints], penalties: Sequence[float]) -> list[LossModel]:
    """Return the log loss fitted to all points of `runs`, for each of `penalties`, as in `PENALTIES`."""
    steps, losses = (np.concatenate([getattr(run, name) for run in runs]) for name in ("steps", "losses"))
    ranks = np.concatenate([np.full(len(run.steps), float(run.ranks)) for run in runs])
    table, known = features(steps, ranks), np.log(losses)
    centre, scale = table.mean(axis=0), table.std(axis=0)
    scale[scale < 1e-9 * np.abs(centre)] = np.inf  # a feature that is the same everywhere gets no weight
    table = (table - centre) / scale
    gram, moments = table.T @ table / len(known), table.T @ (known - known.mean()) / len(known)
    last_steps = [run.steps[-1] for run in runs]
    first, last = max(min(last_steps) / 8, 1.0), 2.0 * max(last_steps)
    weights, found = np.zeros(len(moments)), list[LossModel]()
    for penalty in penalties:
        weights = descend(gram, moments, penalty * float(np.abs(moments).max()), weights)
        own = weights / scale
        found.append(LossModel(own, float(known.mean() - centre @ own), first, last))
    return found


def descend(gram: Values, moments: Values, penalty: float, start: Values) -> Values:
    """Return the weights w that minimise ``w'gram w / 2 - moments'w + penalty |w|``, one coordinate at a time."""
    weights, owns = start.copy(), gram.diagonal().tolist()
    rest = moments - gram @ weights
    for _ in range(MOST_SWEEPS):
        largest = 0.0
        for place, own in enumerate(owns):
            before = float(weights[place])
            pull = float(rest[place]) + own * before
            after = copysign(abs(pull) - penalty, pull) / own if abs(pull) > penalty else 0.0
            if after != before:
                weights[place] = after
                rest -= gram[place] * (after - before)
                largest = max(largest, abs(after - before))
        if largest < TOLERANCE:
            break
    return weights


def chosen_penalty(runs: Sequence[LossPoints]) -> float:
    """Return the penalty whose fit predicts runs that were held out best."""
    errors = np.zeros(len(PENALTIES))
    for rest, out in held_out(runs):
        errors += [squared_error(model, out) for model in fit_losses(rest, PENALTIES)]
    return PENALTIES[int(errors.argmin())]


def held_out(runs: Sequence[LossPoints]) -> list[tuple[list[LossPoints], list[LossPoints]]]:
    """Return pairs of runs to fit and runs to predict.

    With three rank counts or more, the largest is held out, as larger ones are to be predicted. With two, that would
    leave one. So then the first run of each count is held out, then the second, and so on.
    """
    counts = sorted({run.ranks for run in runs})
    if len(counts) > 2:
        places = [int(run.ranks == counts[-1]) for run in runs]
        return [_split(runs, places, 1)]
    places = [sum(other.ranks == run.ranks for other in runs[:place]) for place, run in enumerate(runs)]
    repeats = min(places.count(place) == len(counts) for place in {*places}) and max(places) > 0
    return [_split(runs, places, place) for place in {*places}] if repeats else [(list(runs), list(runs))]


def _split(runs: Sequence[LossPoints], places: Sequence[int], out: int) -> tuple[list[LossPoints], list[LossPoints]]:
    pairs = list(zip(runs, places, strict=True))
    return [run for run, place in pairs if place != out], [run for run, place in pairs if place == out]


def squared_error(model: LossModel, runs: Sequence[LossPoints]) -> float:
    """Return the mean squared error of log losses, summed over `runs`."""
    errors = (model.log_losses(run.steps, run.ranks) - np.log(run.losses) for run in runs)
    return float(sum(np.mean(error**2) for error in errors))
