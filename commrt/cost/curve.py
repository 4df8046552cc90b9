# SPDX-License-Identifier: Apache-2.0
"""A recorded training run as the planner sees it: the loss of each step, and how noisy the gradients were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from commrt.errors import UsageError

__all__ = ["GOSSIP", "LOCAL", "SYNCHRONOUS", "Curve", "Losses"]

Losses = NDArray[np.float64]
"""[steps]"""

MOST = 1 << 31
"""Largest number of a curve."""
SYNCHRONOUS, GOSSIP, LOCAL = "synchronous", "gossip", "local"
"""How ranks train. All all-reduces train alike, so they share a name."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What one run recorded; raises `UsageError` for a run without steps.

    >>> Curve("local", 4, 64, np.ones(10), settings={"period": 8}).method
    'local, period 8'
    """

    training: str
    """`SYNCHRONOUS`, `GOSSIP` or `LOCAL`."""
    ranks: int
    batch: int
    """Samples of all ranks in a step."""
    losses: Losses
    """[steps]: mean over ranks of the training loss of each step, before its update."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """What else decides how training converges, such as the period of local SGD."""
    seed: int = 0
    signal: Losses | None = None
    """[steps]: estimates of the squared norm of the true gradient, G2; None if ranks do not average gradients."""
    noise: Losses | None = None
    """[steps]: estimates of the variance of a rank's gradient, V."""

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("batch", self.batch), ("seed", self.seed)):
            if type(value) is not int or not 0 <= value <= MOST:
                raise UsageError(f"a curve with {name}={value!r:.80}: give a whole number up to {MOST:,}")
        is_flat = isinstance(self.settings, Mapping) and all(
            isinstance(value, int | float | str) for value in self.settings.values()
        )
        if not isinstance(self.training, str) or not is_flat:
            raise UsageError("a curve's training must be a text, and its settings an object of numbers and texts")
        if self.ranks < 1 or self.batch < self.ranks or not len(self.losses):
            raise UsageError(
                f"a curve of {self.ranks} ranks, {self.batch} samples and {len(self.losses)} steps: all must be at "
                "least 1, with a sample for each rank"
            )

    @property
    def method(self) -> str:
        """How the ranks train, in words; curves of one method are fitted together."""
        return ", ".join([self.training, *(f"{name} {value}" for name, value in self.settings.items())])

    @property
    def common_losses(self) -> Losses:
        """[steps]: losses of the steps in which ranks agree, each held until they agree again.

        In local SGD that is the step after each average. Within a period ranks drift apart, and the mean of their
        losses rises: it is the loss of no model. Where ranks average in each step, and in gossip, all losses count.
        """
        period, delay = (self.settings.get(name, default) for name, default in (("period", 1), ("delay", 0)))
        if not (isinstance(period, int) and isinstance(delay, int) and period > 1 and delay >= 0):
            return self.losses
        held = self.losses[delay::period].repeat(min(period, len(self.losses)))
        return np.concatenate([self.losses[:delay], held])[: len(self.losses)]
