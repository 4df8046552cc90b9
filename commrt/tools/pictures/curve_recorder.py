# SPDX-License-Identifier: Apache-2.0
"""Records a curve in any training loop: the loss of each step, and how noisy the gradients were."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from commrt.runtime.world import World
from commrt.tools.pictures.history import gather
from commrt.tools.planning.curve import Curve, Losses
from commrt.training.hooks import on_gradient

__all__ = ["CurveRecorder", "gradient_statistics"]


class CurveRecorder:
    """Records the loss of each step of one rank, and with `model` also the squared norms of its gradients.

    Make it before `attach`: its hooks must see a gradient before that is averaged. Give it the `model` only where ranks
    average gradients in each step. Nothing travels until `curve` is called::

        recorder = CurveRecorder(model)
        replica = commrt.attach(model, optimizer, world=world)
        for pixels, digits in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels), digits)
            loss.backward()
            optimizer.step()
            recorder.record(loss.item())
        curve = recorder.curve(world, SYNCHRONOUS, batch=16 * world.size)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._params = [] if model is None else [param for param in model.parameters() if param.requires_grad]
        self._losses: list[float] = []
        self._own: list[float] = []
        self._mean: list[float] = []
        self._squares = dict[int, Tensor]()  # of this step, by parameter: those of an accumulation replace each other
        self._handles = [on_gradient(param, _keep(self._squares, i)) for i, param in enumerate(self._params)]

    def record(self, loss: float) -> None:
        """Record a step; call it after ``backward()``, and before gradients are zeroed, clipped or unscaled."""
        self._losses.append(float(loss))
        if self._params:
            self._own.append(_total(self._squares.values()))
            self._mean.append(_total(_square(param.grad) for param in self._params if param.grad is not None))
            self._squares.clear()

    def curve(
        self, world: World, training: str, batch: int, settings: Mapping[str, int | float | str] | None = None,
        seed: int = 0,
    ) -> Curve | None:  # fmt: skip
        """Return the curve on the first rank that is left, None on the others; collective, and ends the recording.

        The arguments are those of `Curve`. It has the steps that all ranks have made. Lost ranks are
        counted in its settings: the others had smaller batches.
        """
        for handle in self._handles:
            handle.remove()
        texts = gather(world, "curve", json.dumps([self._losses, self._own]))
        if texts is None:
            return None
        of_ranks = [json.loads(text) for text in texts]
        steps = min(len(losses) for losses, _ in of_ranks)
        losses, own = (np.mean([row[:steps] for row in rows], axis=0) for rows in zip(*of_ranks, strict=True))
        lost = {"lost": len(world.lost)} if world.lost else {}
        signal, noise = None, None
        if self._params and world.size > 1:
            signal, noise = gradient_statistics(own, np.array(self._mean[:steps]), len(texts))
        return Curve(training, world.size, batch, losses, {**(settings or {}), **lost}, seed, signal, noise)


def gradient_statistics(own: Losses, mean: Losses, ranks: int) -> tuple[Losses, Losses]:
    """Return the squared norm of the true gradient and the variance of a rank's, [steps], both estimated.

    `own` is the mean over `ranks` ranks of the squared norm of their gradient, `mean` that of the mean gradient.

    >>> gradient_statistics(np.array([5.0]), np.array([3.0]), 2)  # two gradients, such as (1, 1) and (2, 2)
    (array([1.]), array([4.]))
    """
    with np.errstate(invalid="ignore"):  # a run that diverges
        return (ranks * mean - own) / (ranks - 1), ranks * (own - mean) / (ranks - 1)


def _keep(squares: dict[int, Tensor], index: int) -> Callable[[Tensor], None]:
    """Return a hook that puts the squared norm of a gradient into `squares`; it refers to nothing else."""

    def keep(param: Tensor) -> None:
        if param.grad is not None:
            squares[index] = _square(param.grad)

    return keep


def _square(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
    return norm.square()


def _total(squares: Iterable[Tensor]) -> float:
    return float(sum(squares, torch.zeros(())))
