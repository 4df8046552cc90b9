# SPDX-License-Identifier: Apache-2.0
"""Chooses what a model's gradients become in each step. State of the communication thread."""

from __future__ import annotations

import torch
from torch import Tensor

from commrt.adaptive import Adaptive, Progress
from commrt.coding import Coding

__all__ = ["Coder"]


class Coder:
    """The coding of each step: always the same one, or what an `Adaptive` wire's rule says; None for plain wires."""

    def __init__(self, wire: Coding | Adaptive | None) -> None:
        self._wire = wire
        self._now = wire.coding(None) if isinstance(wire, Adaptive) else wire
        self._step: int | None = None
        self._squares: list[Tensor] = []  # of the norms of this step's buckets
        self._resumed: float | None = None  # the norm that a checkpoint holds

    def at(self, step: int) -> Coding | None:
        """Return the coding of `step`, after all of the step before was averaged."""
        if isinstance(self._wire, Adaptive) and step != self._step:
            norm = self.norm
            self._now = self._wire.coding(None if norm is None else Progress(step, norm))
            self._step, self._squares, self._resumed = step, [], None
        return self._now

    def note(self, average: Tensor) -> None:
        """Look at a bucket's `average`, fp32 [numel], of the step that runs."""
        if isinstance(self._wire, Adaptive):
            self._squares.append(torch.linalg.vector_norm(average, dtype=torch.float64).square())

    @property
    def norm(self) -> float | None:
        """The norm of the latest average, rounded to fp32, so that the order of additions makes no difference."""
        if not self._squares:
            return self._resumed
        return float(torch.stack(self._squares).sum().sqrt().float())

    def resume(self, norm: float | None) -> None:
        """Go on after a step whose average had this `norm`."""
        self._step, self._squares, self._resumed = None, [], norm
