# SPDX-License-Identifier: Apache-2.0
"""Training steps that compute by sleeping, so that computing hides an exchange on any number of cores.

A third of a step's time is in the forward pass, the rest in the backward pass. Each pass goes block by block, so that
gradients become ready one after the other.
"""

from __future__ import annotations

from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

import commrt
from commrt.algorithm import Algorithm
from commrt.training.replica import Replica

__all__ = ["Training"]

BLOCKS = 8
CAP_MB = 4.0


def algorithms(hosts: int, per_host: int) -> dict[str, Algorithm]:
    """Return the algorithms, by name."""
    return {
        "ring": commrt.Ring(),
        "torus2d": commrt.Torus2D((per_host, hosts)),
        "gossip": commrt.Gossip(),
        "hierarchical gossip": commrt.Gossip(within=per_host),
        "gossip, a step late": commrt.Gossip(staleness=1),
        "hierarchical gossip, a step late": commrt.Gossip(staleness=1, within=per_host),
    }


class _Block(Function):
    """Pass the input on; the gradient of the parameter is ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, compute_s: float) -> Tensor:
        sleep(compute_s / 3)
        ctx.compute_s, ctx.shape = compute_s, param.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        sleep(2 * ctx.compute_s / 3)
        return grad, torch.ones(ctx.shape), None


class Blocks(nn.Module):
    """A model of parameters [numel / BLOCKS] that sleeps `compute_s` in each step."""

    def __init__(self, numel: int, compute_s: float) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.zeros(numel // BLOCKS)) for _ in range(BLOCKS)])
        self.compute_s = compute_s

    def forward(self, x: Tensor) -> Tensor:
        for param in self.params:
            x = _Block.apply(x, param, self.compute_s / BLOCKS)
        return x.sum()


class Training:
    """The model, optimizer and replica of one algorithm."""

    def __init__(self, world: commrt.World, algorithm: Algorithm, numel: int, compute_s: float) -> None:
        self.model = Blocks(numel, compute_s)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.replica: Replica = commrt.attach(self.model, self.optimizer, algorithm, world=world, bucket_cap_mb=CAP_MB)
        self.taken = 0

    def seconds(self, steps: int) -> float:
        """Return the mean seconds of some steps in a row; raise `RuntimeError` if their updates are wrong."""
        took_s = self.train(steps)
        self.replica.drain()
        self._check()
        return took_s

    def train(self, steps: int) -> float:
        """Return the mean seconds of some steps in a row, and leave in flight what is."""
        dist.barrier()
        begin_s = perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.zeros(1, requires_grad=True)).backward()
            self.optimizer.step()
        self.taken += steps
        return (perf_counter() - begin_s) / steps

    def _check(self) -> None:
        """Check the weights. All gradients are ones, so the weights are minus the number of updates, or one less."""
        found = torch.cat([param.detach() for param in self.model.params])
        if not (-self.taken - 1e-3 <= found.min() and found.max() <= 1e-3 - self.taken / 2):
            raise RuntimeError(f"weights of {found.min():g} to {found.max():g} after {self.taken} steps")
