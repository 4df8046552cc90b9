# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers of local SGD: how the anchor follows the average of what ranks have learned.

A rule is a frozen value with one method, ``step(anchor, difference, velocity, inner_rate)``. It
changes `anchor` and `velocity`, numpy arrays or tensors of one shape, in place. `difference` is the
anchor minus the average of the ranks' weights, so without a rule the anchor would become
``anchor - difference``. `velocity` is zero before the first step, and is kept from step to step.
`inner_rate` is the optimizer's learning rate when the weights left.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol

from commrt.errors import UsageError

Values = Any


class Outer(Protocol):
    """What `LocalSGD` takes as its outer optimizer; write one of your own as a frozen dataclass."""

    def step(self, anchor: Values, difference: Values, velocity: Values, inner_rate: float) -> None:
        """Move `anchor`, and update `velocity`."""
        ...


@dataclass(frozen=True, slots=True)
class HeavyBall:
    """Momentum SGD: ``v = momentum v + difference``, ``anchor -= rate v``. NoLoCo has 0.7, 0.3."""

    rate: float = 0.7
    momentum: float = 0.3

    def __post_init__(self) -> None:
        _require_momentum(self)
        _require_rate(self, 2 * (1 + self.momentum))

    @property
    def late_bound(self) -> float:
        """The rate below which the anchor comes to rest if each average is a whole period late."""
        return 2 * (1 - self.momentum**2)

    def step(self, anchor: Values, difference: Values, velocity: Values, inner_rate: float) -> None:
        """Move `anchor`, and update `velocity`."""
        velocity *= self.momentum
        velocity += difference
        anchor -= self.rate * velocity


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Nesterov's momentum: v = momentum v + difference, anchor -= rate (difference + momentum v).

    DiLoCo has 0.7 and 0.9, for hundreds of steps of AdamW in a period. For momentum SGD inside, and
    for short periods, that is too much: see docs/algorithms/local_sgd.md.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_momentum(self)
        _require_rate(self, 2 * (1 + self.momentum) / (1 + 2 * self.momentum))

    @property
    def late_bound(self) -> float:
        """The rate below which the anchor comes to rest if each average is a whole period late.

        >>> round(Nesterov(0.7, 0.9).late_bound, 2)
        1.09
        """
        square = self.momentum**2
        linear = 1 + self.momentum - square
        root = sqrt(linear**2 + 4 * square * (1 - self.momentum))
        return 1 + 2 * (1 - self.momentum) / (linear + root)

    def step(self, anchor: Values, difference: Values, velocity: Values, inner_rate: float) -> None:
        """Move `anchor`, and update `velocity`."""
        velocity *= self.momentum
        velocity += difference
        anchor -= self.rate * (difference + self.momentum * velocity)


@dataclass(frozen=True, slots=True)
class SlowMomentum(HeavyBall):
    """SlowMo: v = momentum v + difference / r, anchor -= rate r v, with the inner learning rate r.

    So the momentum of times with another learning rate counts as gradients, not as distances.
    """

    rate: float = 1.0
    momentum: float = 0.5

    def step(self, anchor: Values, difference: Values, velocity: Values, inner_rate: float) -> None:
        """Move `anchor`, and update `velocity`; raises `UsageError` for an inner rate of 0."""
        if not inner_rate > 0:
            raise UsageError(
                f"SlowMomentum divides by the optimizer's learning rate, which was {inner_rate:g}"
                " when the weights left: keep it above 0, or use Nesterov or HeavyBall"
            )
        velocity *= self.momentum
        velocity += difference / inner_rate
        anchor -= self.rate * inner_rate * velocity


def _require_momentum(rule: HeavyBall | Nesterov) -> None:
    _require_number(rule, "momentum", rule.momentum)
    if not 0 <= rule.momentum < 1:
        name = type(rule).__name__
        raise UsageError(f"{name}(momentum={rule.momentum:g}): it must be from 0 on and below 1")


def _require_rate(rule: HeavyBall | Nesterov, bound: float) -> None:
    """Raise `UsageError` for a rate that diverges even if each period ended in the minimum."""
    _require_number(rule, "rate", rule.rate)
    if not 0 < rule.rate < bound:
        name = type(rule).__name__
        raise UsageError(
            f"{name}(rate={rule.rate:g}, momentum={rule.momentum:g}): the rate must be above 0 and"
            f" below {bound:.3g}, or the anchor swings about its goal ever more widely"
        )


def _require_number(rule: object, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{type(rule).__name__}({name}={value!r:.80}): give a number")
