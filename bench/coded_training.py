# SPDX-License-Identifier: Apache-2.0
"""Train a small CNN on MNIST with the runtime, one thread per rank, over any wire: for ``bench/coded_learning.py``.

8 ranks take batches of 16 images, averaged to 14x14, for 480 steps of SGD with momentum 0.9. The rate climbs to 0.05
within 20 steps, then falls along half a cosine to 0. A seed decides the first weights, the shards, the order of the
images and all random rounding, so a run can be repeated bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import mean

import torch
from digits import Images, load
from learning import batches, shards
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import commrt
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks

__all__ = ["LR", "RANKS", "SIDE", "STEPS", "Outcome", "Wire", "WireFor", "network", "rate", "small_images", "trained"]

RANKS, STEPS, WARMUP, LR, MOMENTUM, SIDE = 8, 480, 20, 0.05, 0.9, 14

Wire = torch.dtype | commrt.Coding | commrt.Adaptive | None


@dataclass
class LatestLoss:
    """The loss of the step that runs, averaged over all ranks, for a rule that looks at it."""

    value: float = math.inf
    is_used: bool = False

    def __call__(self) -> float:
        """Return the loss."""
        return self.value

    def wanted(self) -> LatestLoss:
        """Return this object; from now on each step averages the loss over the ranks."""
        self.is_used = True
        return self


WireFor = Callable[[int, LatestLoss], Wire]
"""(seed, latest loss) -> the wire of a rank."""


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
    """Return a CNN of 8,826 parameters, initialised from `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


@cache
def small_images() -> tuple[Images, Images]:
    """Return the images to train on and to test with, [n, 1, 14, 14]: means of 2x2 pixels."""
    train, test = (Images(avg_pool2d(images.pixels, 2), images.digits) for images in load())
    return train, test


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (1 + math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1))) / 2


def trained(wire_for: WireFor, seed: int, steps: int = STEPS, ranks: int = RANKS) -> Outcome:
    """Train with `Direct`; raise `RuntimeError` unless all replicas end bitwise equal."""
    first, (x, y) = network(seed), shards(small_images()[0], ranks, seed)
    places = list(batches(x.shape[1], ranks, seed, steps))

    def body(world: World) -> tuple[nn.Module, float]:
        own = [place[world.rank] for place in places]
        feed = [(x[world.rank][rows].view(-1, 1, SIDE, SIDE), y[world.rank][rows]) for rows in own]
        return _train_rank(world, copy.deepcopy(first), wire_for, seed, feed)

    found = run_ranks(ranks, body)
    require_equal([model for model, _ in found])
    return assessed(found[0][0], mean(nbytes for _, nbytes in found))


def _train_rank(
    world: World, model: nn.Module, wire_for: WireFor, seed: int, feed: Sequence[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, float]:
    """Return the trained model of a rank, and the bytes that it sent per step."""
    optimizer, latest = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), LatestLoss()
    replica = commrt.attach(model, optimizer, commrt.Direct(), wire=wire_for(seed, latest), world=world)
    for step, (pixels, digits) in enumerate(feed):
        optimizer.param_groups[0]["lr"] = rate(step, len(feed))
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels), digits)
        if latest.is_used:
            # Before the backward pass, in which the communication thread asks the rule.
            world.all_reduce(shared := loss.detach().clone(), algorithm=commrt.Direct())
            latest.value = float(shared)
        loss.backward()
        optimizer.step()
    replica.drain()
    return model, replica.stats().nbytes_sent / len(feed)


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
