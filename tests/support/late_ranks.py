# SPDX-License-Identifier: Apache-2.0
"""Training loops with backup workers in which ranks come late, without anybody sleeping."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn

import commrt
from commrt.testing.ranks import run_ranks

LIMIT_S = 30.0


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()


with torch.random.fork_rng():
    MODEL = made()
    NORMED = nn.Sequential(deepcopy(MODEL).float(), nn.BatchNorm1d(3), nn.Linear(3, 2))


def batch(rank, version):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * version + rank), dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model, rank, version):
    model.zero_grad()
    model(batch(rank, version)).square().mean().backward()


def trainee(world, algorithm, *, of=MODEL, **options):
    """Return a copy of a model with its optimizer and replica."""
    model = deepcopy(of)
    optimizer = sgd(model)
    return model, optimizer, commrt.attach(model, optimizer, algorithm, world=world, **options)


def attached(world, algorithm):
    model = deepcopy(MODEL)
    return commrt.attach(model, sgd(model), algorithm, world=world)


def at(replica):
    """The version of the weights that the next forward pass uses."""
    replica.drain()
    return replica.step


@dataclass
class Progress:
    """How far the ranks of a test have come, so that one can be late without anybody sleeping."""

    passed: int = 0  # steps that somebody has passed
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, step):
        with self.changed:
            self.passed = max(self.passed, step)
            self.changed.notify_all()

    def wait_for(self, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.passed >= step, LIMIT_S)


def trained(world, algorithm, steps, progress, lateness, **options):
    """Trains until the weights have seen `steps` updates; late by ``lateness(rank, version)`` steps where not None."""
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=1e-4, **options)
    used = {}
    while (version := at(replica)) < steps:
        late = lateness(world.rank, version)
        if late is not None:
            progress.wait_for(min(version + late, steps))
        backward(model, world.rank, version)
        optimizer.step()
        if replica.last.counted:
            used[replica.last.step] = replica.last.members
        progress.tell(replica._backup_step.version)
    return used, [param.detach().clone() for param in model.parameters()], replica.replicas_equal()


def reference(steps, used):
    """The same steps in one process, with the gradients that were counted."""
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    for step in range(steps):
        gradients = []
        for rank in used[step]:
            backward(model, rank, step)
            gradients.append([param.grad.clone() for param in model.parameters()])
        for param, *parts in zip(model.parameters(), *gradients, strict=True):
            param.grad = sum(parts) / len(parts)
        optimizer.step()
    return list(model.parameters())


def check(ends, steps, needed):
    used = {}
    for mine, _, equal in ends:
        assert equal
        for step, members in mine.items():
            assert used.setdefault(step, members) == members
    assert sorted(used) == list(range(steps))
    assert all(len(members) == needed for members in used.values())
    for step, members in used.items():  # all whom the others counted know it, and nobody else does
        assert {rank for rank, (mine, _, _) in enumerate(ends) if step in mine} == set(members)
    for (_, params, _), wanted in ((end, reference(steps, used)) for end in ends):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(params, wanted, strict=True))


LATE, AT = 2, 3
"""The rank that is late in most tests, and the step."""


class Loop:
    """A training loop of which one rank is late once; `each` is called after every backward pass."""

    def __init__(self, ranks=4, algorithm=None, late_by=1, steps=8):
        self.ranks, self.algorithm, self.steps = ranks, algorithm or commrt.BackupWorkers(1), steps
        self.progress, self.late_by, self.late_is_there = Progress(), late_by, threading.Event()

    def wait(self, world, replica):
        """The rank that is late waits here until the others are gone; they, that it has not been left behind before."""
        if at(replica) != AT:
            return
        if world.rank == LATE:
            self.late_is_there.set()
            self.progress.wait_for(AT + self.late_by)
        else:  # in the forward pass, where this rank's state may be copied by who was left behind
            replica.model.register_forward_pre_hook(self.wait_for_who_is_late)

    def wait_for_who_is_late(self, *_):
        assert self.late_is_there.wait(LIMIT_S)

    def step(self, world, replica, optimizer):
        """Train for one step, in which this rank may be late."""
        self.wait(world, replica)
        backward(replica.model, world.rank, replica.step)
        optimizer.step()
        self.progress.tell(replica._backup_step.version)

    def train(self, world, replica, optimizer):
        while at(replica) < self.steps:
            self.wait(world, replica)
            optimizer.zero_grad()
            replica.model(batch(world.rank, replica.step).float()).square().mean().backward()
            optimizer.step()
            self.progress.tell(replica._backup_step.version)

    def run(self, body):
        return run_ranks(self.ranks, lambda world: body(self, world))


def to_the_late_step(loop, world, replica, optimizer):
    """One rank has just dropped its gradient, and the others have stepped with theirs."""

    def step():
        loop.wait(world, replica)
        backward(replica.model, world.rank, replica.step)
        optimizer.step()
        loop.progress.tell(replica._backup_step.version)

    while at(replica) < AT:
        step()
    step()
    return step


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def all_are_equal(ends):
    return all(torch.equal(*pair) for end in ends for pair in zip(end, ends[0], strict=True))
