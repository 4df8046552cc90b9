# SPDX-License-Identifier: Apache-2.0
"""Small trainings that must come out the same however the gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS = 20
SAMPLES = 240  # divides by 1, 2, 3, 4, 5, 6 and 8 workers, and again by 2 micro-batches
CLASSES = 7

NoSync = Callable[[], AbstractContextManager[None]]


class Plain(nn.Module):
    """LayerNorm, not BatchNorm: statistics of a batch depend on how it is split."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x, step, rank):
        return self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(requires_grad=False)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.third = nn.Linear(32, 32)
        self.third.weight = self.second.weight

    def forward(self, x, step, rank):
        hidden = torch.tanh(self.second(self.norm(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(self.third(hidden)))


class Unused(Plain):
    """One layer that everybody leaves out in most steps, one that only one rank at a time uses."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(32, 32)
        self.by_turns = nn.Linear(32, 32)

    def forward(self, x, step, rank):
        hidden = self.norm(torch.tanh(self.first(x)))
        if step % 3 == 1:
            hidden = hidden + self.sometimes(hidden)
        if rank == step % 2:
            hidden = hidden + self.by_turns(hidden)
        return self.last(torch.tanh(self.second(hidden)))


@dataclass(frozen=True)
class Scenario:
    name: str
    model: type[nn.Module] = Plain
    micro_batches: int = 1
    clip: float | None = None
    schedule: bool = False
    backend: str | None = None
    """Of torch.compile, where the model is compiled."""
    unused: bool = False
    adamw: bool = False


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain"),
        Scenario("accumulation", micro_batches=2),
        Scenario("clipping", clip=0.05),
        Scenario("frozen layer", model=Frozen),
        Scenario("layer unused in some steps", model=Unused, unused=True),
        Scenario("tied weights", model=Tied),
        Scenario("learning rate schedule", schedule=True),
        Scenario("compiled model", backend="aot_eager"),
        Scenario("AdamW", adamw=True),
    )
}

INDUCTOR = Scenario("compiled by inductor", backend="inductor")


def build(scenario: Scenario) -> nn.Module:
    torch.manual_seed(11)
    return scenario.model()


def optimizer_of(scenario: Scenario, model: nn.Module) -> torch.optim.Optimizer:
    if scenario.adamw:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(SAMPLES, 20, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def shares(scenario: Scenario, step: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of a step."""
    x, y = batch(step)
    for part in range(scenario.micro_batches):
        mine = slice(rank + part * size, None, size * scenario.micro_batches)
        yield x[mine], y[mine]


def train(
    scenario: Scenario,
    call: nn.Module,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: tuple[int, int],
    no_sync: NoSync = nullcontext,
) -> list[Tensor]:
    """Train `model` through `call` as rank, size = `place`; its parameters afterwards."""
    rank, size = place
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5) if scenario.schedule else None
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = list(shares(scenario, step, rank, size))
        for i, (x, y) in enumerate(parts):
            with no_sync() if i < len(parts) - 1 else nullcontext():
                (cross_entropy(call(x, step, rank), y) / len(parts)).backward()
        finish_step(scenario, model, optimizer, decay)
    return [param.detach().clone() for param in model.parameters()]


def train_joined(scenario: Scenario, size: int) -> list[Tensor]:
    """One process on the whole batch; where ranks compute different things, on each rank's part of the loss."""
    model = build(scenario)
    optimizer = optimizer_of(scenario, model)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5) if scenario.schedule else None
    for step in range(STEPS):
        optimizer.zero_grad()
        if scenario.unused:
            for rank in range(size):
                for x, y in shares(scenario, step, rank, size):
                    (cross_entropy(model(x, step, rank), y) / size).backward()
        else:
            x, y = batch(step)
            cross_entropy(model(x, step, 0), y).backward()
        finish_step(scenario, model, optimizer, decay)
    return [param.detach().clone() for param in model.parameters()]


def finish_step(scenario, model, optimizer, decay):
    if scenario.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), scenario.clip)
    optimizer.step()
    if decay is not None:
        decay.step()


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative L2 distance between tensors of the same place."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in pairs)
