# SPDX-License-Identifier: Apache-2.0
"""Train a small CNN on MNIST with the runtime, one thread per rank, over any wire: for `compare_wires`.

A seed decides the first weights, the shards, the order of the images and all random rounding, so a run can be repeated
bit by bit.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt import World
from commrt.testing.ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import SIDE, batches, shards, small_images
from small_cnn import LR, MOMENTUM, RANKS, STEPS, Outcome, assessed, network, rate, require_equal

__all__ = ["LatestLoss", "Wire", "WireFor", "trained"]

Wire = torch.dtype | commrt.quantization.Quantizer | commrt.quantization.Adaptive | None


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
