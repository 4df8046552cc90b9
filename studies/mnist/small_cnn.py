# SPDX-License-Identifier: Apache-2.0
"""The network of the learning studies: a CNN of 8,826 parameters, how 8 ranks train it, and results as columns.

Ranks take batches of 16 images of 14x14 pixels, for 480 steps of SGD with momentum 0.9. The rate climbs to 0.05 within
20 steps, then falls along half a cosine to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

import torch
from mnist_images import small_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = [
    "LR", "MOMENTUM", "RANKS", "STEPS", "Outcome", "assessed", "columns", "network", "rate", "require_equal", "spread",
]  # fmt: skip

RANKS, STEPS, WARMUP, LR, MOMENTUM = 8, 480, 20, 0.05, 0.9


@dataclass(frozen=True)
class Outcome:
    """The results of a run, whose replicas were bitwise equal at its end."""

    accuracy: float
    """On 1,000 test images, in percent."""
    loss: float
    """On all 4,000 training images, after the last step."""
    nbytes: float
    """Bytes sent per rank and step as the runtime counts them, the mean of all ranks."""
    weights: Tensor = field(repr=False)


def network(seed: int) -> nn.Sequential:
    """Return the CNN, initialised from `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1))) / 2


def require_equal(models: Sequence[nn.Module]) -> None:
    """Raise `RuntimeError` unless all parameters equal those of the first model, bit by bit."""
    for rank, model in enumerate(models):
        for ours, firsts in zip(model.parameters(), models[0].parameters(), strict=True):
            if not torch.equal(ours, firsts):
                raise RuntimeError(f"the replica of rank {rank} differs from that of rank 0: commrt has a bug")


@torch.no_grad()
def assessed(model: nn.Module, nbytes: float) -> Outcome:
    """Return the results for the model of one rank."""
    train, test = small_images()
    right = model(test.pixels).argmax(1) == test.digits
    loss = float(cross_entropy(model(train.pixels), train.digits))
    weights = torch.cat([param.flatten() for param in model.parameters()])
    return Outcome(100 * right.float().mean().item(), loss, nbytes, weights)


def columns(found: Sequence[Outcome]) -> str:
    """Return accuracy, loss and bytes as columns."""
    accuracy, loss = spread([each.accuracy for each in found], 2), spread([each.loss for each in found], 4)
    return f"{accuracy:>16}{loss:>18}{mean(each.nbytes for each in found):>10.0f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Format mean and standard deviation."""
    return f"{mean(values):.{digits}f} +- {stdev(values) if len(values) > 1 else 0:.{digits}f}"
