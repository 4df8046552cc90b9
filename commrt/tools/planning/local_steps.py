# SPDX-License-Identifier: Apache-2.0
"""Simulated local SGD: what a step costs, and which delay or period hides the exchange.

Frozen, with pure functions of times; `priced` prices the exchange once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from commrt.tools.planning.timeline import blocking_step
from commrt.tools.planning.wires import WirePricing

ROUNDING = 1e-9
"""Relative rounding error of a quotient of two times."""


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Steps of equally fast ranks that average their weights once per period."""

    fragment_s: float
    """The exchange of one fragment, packed and unpacked."""
    compute_s: float
    """The computing of one step."""
    period: int
    fragments: int = 1
    """They leave one after the other, evenly over the period."""

    @classmethod
    def priced(
        cls, pricing: WirePricing, nbytes: float, compute_s: float, period: int, fragments: int = 1
    ) -> LocalSteps:
        """Return the steps of a model of `nbytes` on the wire, in equal fragments."""
        fragment_s = blocking_step(pricing, nbytes / fragments, 0.0).seconds
        return cls(fragment_s, compute_s, period, fragments)

    @property
    def exchange_s(self) -> float:
        """Time to exchange all fragments, one after the other."""
        return self.fragments * self.fragment_s

    def exposed_s(self, delay: int) -> float:
        """Return a step's mean wait, if an average is merged `delay` steps after weights left.

        Each fragment is hidden by `delay` steps, and all fragments of a period by its steps.
        """
        hidden_s = min(self.fragments * delay, self.period) * self.compute_s
        return max(self.exchange_s - hidden_s, 0.0) / self.period

    def step_s(self, delay: int) -> float:
        """Return the mean time of a step."""
        return self.compute_s + self.exposed_s(delay)

    @property
    def hiding_delay(self) -> int | None:
        """The smallest delay that hides the exchange; None if no delay within the period does.

        >>> LocalSteps(fragment_s=0.156, compute_s=0.1, period=16).hiding_delay
        2
        """
        if self.exchange_s > self.period * self.compute_s * (1 + ROUNDING):
            return None
        return ceil(self.fragment_s / self.compute_s * (1 - ROUNDING))


def hiding_period(steps: LocalSteps, most: int) -> LocalSteps | None:
    """Return `steps`, its period doubled until that hides the exchange; None if beyond `most`.

    >>> steps = LocalSteps(fragment_s=2.5, compute_s=0.1, period=16)
    >>> hiding_period(steps, 512).period, hiding_period(steps, 16)
    (32, None)
    """
    while steps.hiding_delay is None and 2 * steps.period <= most:
        steps = LocalSteps(steps.fragment_s, steps.compute_s, 2 * steps.period, steps.fragments)
    return None if steps.hiding_delay is None else steps
