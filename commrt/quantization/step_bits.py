# SPDX-License-Identifier: Apache-2.0
"""Which quantizer a step has, where bits follow from the averages of the steps before.

State of one engine that averages gradients, in memory only; it sends nothing. `StepBits` says which
thread calls what.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commrt.quantization.adaptive_bits import Adaptive, Progress
from commrt.quantizer import Quantizer


class StepBits:
    """The quantizer of each step: always the same one, or what an `Adaptive` wire's rule says.

    `choose` and `note` belong to the thread that averages: mostly the communication thread. `norm`
    and `resume` are for checkpoints: the thread that trains, with nothing in flight.
    """

    def __init__(self, wire: Quantizer | Adaptive) -> None:
        self._wire = wire
        self._now = wire.quantizer(None) if isinstance(wire, Adaptive) else wire
        self._step: int | None = None  # for which `_now` was chosen
        self._squares: list[Tensor] = []  # of the norms of its buckets
        self._resumed: float | None = None  # the norm of a step before `resume`

    def resume(self, norm: float | None) -> None:
        """Go on after a step whose average had this `norm`."""
        self._step = None
        self._squares = []
        self._resumed = norm

    def choose(self, step: int) -> Quantizer:
        """Return the quantizer of `step`, after all of the step before was averaged.

        The first call for a step runs the rule, and forgets the averages before.
        """
        if isinstance(self._wire, Adaptive) and step != self._step:
            norm = self.norm
            self._now = self._wire.quantizer(None if norm is None else Progress(step, norm))
            self._step = step
            self._squares = []
            self._resumed = None
        return self._now

    def note(self, average: Tensor) -> None:
        """Look at a bucket's `average`, fp32 [numel], of the step that runs."""
        if isinstance(self._wire, Adaptive):
            self._squares.append(torch.linalg.vector_norm(average, dtype=torch.float64).square())

    @property
    def norm(self) -> float | None:
        """The norm of the latest average, rounded to fp32: the order of sums does not matter."""
        if not self._squares:
            return self._resumed
        return float(torch.stack(self._squares).sum().sqrt().float())
