# SPDX-License-Identifier: Apache-2.0
"""When ranks have their gradients, as laws: samples of them, and the mean time of the k-th gradient of a step.

Follows J. Chen et al., "Revisiting Distributed Synchronous SGD" (2016); its figures are given as recalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from commrt.errors import UsageError

__all__ = ["Exponential", "HeavyTails", "Jitter", "Law", "Recorded", "SlowSteps", "Times", "kth_time_s", "step_time_s"]

Times = NDArray[np.float64]
"""[steps, ranks]: seconds from the begin of a step until a rank has its gradient."""


class Law(Protocol):
    """How long ranks take."""

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps."""
        ...

    def expected_kth_s(self, ranks: int) -> Times | None:
        """[ranks]: `kth_time_s` of infinitely many steps; None if it has no closed form."""
        ...


@dataclass(frozen=True, slots=True)
class HeavyTails:
    """A normal body, now and then a Pareto tail after it, and a factor that all ranks of a step have in common.

    The numbers are a fit to two percentages, published for 100 machines and as recalled: in 80 % of steps 98
    gradients were there within 2 s, in 30 % all. It gives 85 % and 27 %.
    """

    common_sd: float = 0.08
    """Of the factor's logarithm."""
    body_s: float = 1.45
    body_sd_s: float = 0.09
    floor_s: float = 1.1
    tail_chance: float = 0.033
    tail_scale_s: float = 0.5
    tail_exponent: float = 1.3
    cap_s: float = 310.0
    """The longest wait published, as recalled."""

    def __post_init__(self) -> None:
        _within(0, 1, common_sd=self.common_sd, tail_chance=self.tail_chance)
        _within(0, inf, body_s=self.body_s, body_sd_s=self.body_sd_s, tail_scale_s=self.tail_scale_s)
        _above_zero(floor_s=self.floor_s, tail_exponent=self.tail_exponent)
        _within(self.floor_s, inf, cap_s=self.cap_s)

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps."""
        common = np.exp(rng.normal(0.0, self.common_sd, (steps, 1)))
        body_s = np.maximum(rng.normal(self.body_s, self.body_sd_s, (steps, ranks)), self.floor_s)
        tail_s = self.tail_scale_s * rng.pareto(self.tail_exponent, (steps, ranks))
        has_tail = rng.random((steps, ranks)) < self.tail_chance
        times_s: Times = np.minimum(common * (body_s + np.where(has_tail, tail_s, 0.0)), self.cap_s)
        return times_s

    def expected_kth_s(self, ranks: int) -> None:
        """It has no closed form."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """A constant, then an exponential tail; the law with the simplest closed form.

    >>> Exponential(constant_s=0.0, rate_per_s=1.0).expected_kth_s(3).round(3).tolist()
    [0.333, 0.833, 1.833]
    """

    constant_s: float = 1.0
    rate_per_s: float = 1.0

    def __post_init__(self) -> None:
        _within(0, inf, constant_s=self.constant_s)
        _above_zero(rate_per_s=self.rate_per_s)

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps."""
        return self.constant_s + rng.exponential(1 / self.rate_per_s, (steps, ranks))

    def expected_kth_s(self, ranks: int) -> Times:
        """[ranks]: constant + (H(ranks) - H(ranks - k)) / rate, where H(n) = 1 + 1/2 + ... + 1/n."""
        gaps = 1 / np.arange(ranks, 0, -1)  # after k gradients the next comes from the ranks - k that are left
        return self.constant_s + np.cumsum(gaps) / self.rate_per_s


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """All ranks take `base_s`, but each, with `chance`, `low` to `high` times that, uniformly: injected delays."""

    base_s: float = 1.0
    chance: float = 0.03
    low: float = 5.0
    high: float = 20.0

    def __post_init__(self) -> None:
        _above_zero(base_s=self.base_s)
        _within(0, 1, chance=self.chance)
        _within(1, inf, low=self.low)
        _within(self.low, inf, high=self.high)

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps."""
        factor = rng.uniform(self.low, self.high, (steps, ranks))
        return self.base_s * np.where(rng.random((steps, ranks)) < self.chance, factor, 1.0)

    def expected_kth_s(self, ranks: int) -> Times:
        """[ranks]: the mean over how many are slow; the j-th of m slow ones is expected j / (m + 1) of the way up."""
        chances = reduce(np.convolve, [(1 - self.chance, self.chance)] * ranks, np.ones(1))
        slow, k = np.arange(ranks + 1)[:, None], np.arange(1, ranks + 1)
        place = np.maximum(k - (ranks - slow), 0)
        factor = np.where(place > 0, self.low + (self.high - self.low) * place / (slow + 1), 1.0)
        expected: Times = self.base_s * (chances @ factor)
        return expected


@dataclass(frozen=True, slots=True)
class Jitter:
    """About `base_s`, log-normally; and now and then, with `chance`, `factor` times as long."""

    base_s: float = 1.0
    """The median."""
    variation: float = 0.05
    """Standard deviation over mean."""
    chance: float = 0.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        _above_zero(base_s=self.base_s)
        _within(0, inf, variation=self.variation)
        _within(0, 1, chance=self.chance)
        _within(1, inf, factor=self.factor)

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps."""
        times_s = self.base_s * np.exp(rng.normal(0.0, np.sqrt(np.log1p(self.variation**2)), (steps, ranks)))
        slower: Times = np.where(rng.random((steps, ranks)) < self.chance, self.factor, 1.0)
        return slower * times_s

    def expected_kth_s(self, ranks: int) -> None:
        """It has no closed form."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A run's own times; its steps are drawn again as a whole, so what ranks have in common stays."""

    times_s: Times

    def __post_init__(self) -> None:
        if self.times_s.ndim != 2 or self.times_s.size == 0:
            raise UsageError(f"times of shape {self.times_s.shape}: give them as [steps, ranks], at least one of each")
        if not (np.isfinite(self.times_s) & (self.times_s > 0)).all():
            raise UsageError("a time that is no positive number of seconds: every rank needs one in every step")

    def sample(self, rng: Generator, steps: int, ranks: int) -> Times:
        """Times of so many steps; raises `UsageError` unless `ranks` is what was recorded."""
        recorded = self.times_s.shape[1]
        if ranks != recorded:
            raise UsageError(f"{recorded} ranks were recorded, their times say nothing of {ranks} ranks")
        return self.times_s[rng.integers(len(self.times_s), size=steps)]

    def expected_kth_s(self, ranks: int) -> None:
        """It has no closed form; `kth_time_s` of the recording is what its samples tend to."""


def kth_time_s(times_s: Times) -> Times:
    """[ranks]: mean time of the k-th gradient of a step, for k = 1, 2, ...

    >>> kth_time_s(np.array([[3.0, 1.0], [1.0, 5.0]])).tolist()
    [1.0, 4.0]
    """
    mean: Times = np.sort(times_s, axis=1).mean(axis=0)
    return mean


def step_time_s(times_s: Times, needed: ArrayLike) -> Times:
    """Mean time of a step that ends with so many gradients, for each of `needed`, if a late rank is not interrupted.

    It finishes the gradient nobody wants any more, then begins one for the step that the others are at; it may miss
    several steps. `kth_time_s`, the published way, lets all ranks begin every step together.

    >>> step_time_s(np.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]]), [1, 2]).tolist()
    [1.0, 3.0]
    """
    last = np.atleast_1d(np.asarray(needed))[:, None] - 1
    free_s, now_s = np.zeros((len(last), times_s.shape[1])), np.zeros((len(last), 1))
    for step_s in times_s:
        begin_s = np.maximum(free_s, now_s)
        ready_s = begin_s + step_s
        now_s = np.take_along_axis(np.sort(ready_s, axis=1), last, axis=1)
        free_s = np.where(begin_s < now_s, ready_s, begin_s)
    mean: Times = now_s[:, 0] / len(times_s)
    return mean


def _within(least: float, most: float, **values: float) -> None:
    for name, value in values.items():
        if not (least <= value <= most and value < inf):
            limit = f"between {least:g} and {most:g}" if most < inf else f"at least {least:g}, and finite"
            raise UsageError(f"{name} is {value:g}: it must be {limit}")


def _above_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < inf:
            raise UsageError(f"{name} is {value:g}: it must be above 0, and finite")
