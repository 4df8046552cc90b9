# SPDX-License-Identifier: Apache-2.0
"""Records a curve in any training loop: the loss of each step, and how noisy the gradients were.

To use it in a program of your own, copy this file, and ``gather.py`` of ``examples/mnist``, beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from gather import gather_on_first
from numpy.typing import NDArray
from torch import Tensor, nn

import commrt

__all__ = ["CurveRecorder", "Settings", "gradient_statistics"]

Settings = Mapping[str, int | float | str]
Steps = NDArray[np.float64]
"""[steps]"""


class CurveRecorder:
    """Records the loss of each step of one rank, and with `model` also the squared norms of its gradients.

    Make it before `attach`: its hooks must see a gradient before that is averaged. Give it the `model` only where ranks
    average gradients in each step. Nothing travels until `lines` is called::

        recorder = CurveRecorder(model)
        replica = commrt.attach(model, optimizer, world=world)
        for pixels, digits in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels), digits)
            loss.backward()
            optimizer.step()
            recorder.record(loss.item())
        text = recorder.lines(world, "synchronous", batch=16 * world.size)
        if text is not None:
            Path("curve.jsonl").write_text(text)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._params = [] if model is None else [param for param in model.parameters() if param.requires_grad]
        self._losses: list[float] = []
        self._own: list[float] = []
        self._mean: list[float] = []
        self._squares = dict[int, Tensor]()  # of this step, by parameter: those of an accumulation replace each other
        self._handles = [
            param.register_post_accumulate_grad_hook(_keep(self._squares, i)) for i, param in enumerate(self._params)
        ]

    def record(self, loss: float) -> None:
        """Record a step; call it after ``backward()``, and before gradients are zeroed, clipped or unscaled."""
        self._losses.append(float(loss))
        if self._params:
            self._own.append(_total(self._squares.values()))
            self._mean.append(_total(_square(param.grad) for param in self._params if param.grad is not None))
            self._squares.clear()

    def lines(
        self,
        world: commrt.World,
        training: str,
        batch: int,
        settings: Settings | None = None,
        seed: int = 0,
        recipe: Settings | None = None,
    ) -> str | None:
        """Return the curve as JSON lines on the first rank that is left, None on the others.

        Collective, and ends the recording. ``studies/time_to_loss/README.md`` describes the lines and the arguments.
        The curve has the steps that all ranks have made. Lost ranks are counted in its settings: the others had smaller
        batches.
        """
        for handle in self._handles:
            handle.remove()
        texts = gather_on_first(world, "curve", json.dumps([self._losses, self._own]))
        if texts is None:
            return None
        lost = {"lost": len(world.lost)} if world.lost else {}
        head = {"commrt_curve": 1, "training": training, "ranks": world.size, "batch": batch}
        head |= {"settings": {**(settings or {}), **lost}, "seed": seed} | ({"recipe": recipe} if recipe else {})
        columns = self._columns([json.loads(text) for text in texts], world.size)
        rows = zip(*columns.values(), strict=True)
        steps = ({"step": i, **dict(zip(columns, row, strict=True))} for i, row in enumerate(rows))
        return "".join(f"{json.dumps(line)}\n" for line in (head, *steps))

    def _columns(self, of_ranks: list[tuple[list[float], list[float]]], size: int) -> dict[str, list[float]]:
        """Return what is known of each step, given losses and squared norms of each rank that is left."""
        steps = min(len(losses) for losses, _ in of_ranks)
        losses, own = (np.mean([row[:steps] for row in rows], axis=0) for rows in zip(*of_ranks, strict=True))
        columns = {"loss": losses}
        if self._params and size > 1:
            signal, noise = gradient_statistics(own, np.array(self._mean[:steps]), len(of_ranks))
            columns |= {"signal": signal, "noise": noise}
        return {name: values.tolist() for name, values in columns.items()}


def gradient_statistics(own: Steps, mean: Steps, ranks: int) -> tuple[Steps, Steps]:
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
