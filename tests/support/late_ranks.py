# SPDX-License-Identifier: Apache-2.0
"""Training loops with backup workers in which ranks come late, without anybody sleeping."""

import threading
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import small_models
import torch
from gossip_models import model_of
from gossip_models import params as weights  # noqa: F401  # for tests
from small_models import attached
from torch import nn

import commrt
from commrt.testing.ranks import run_ranks

LIMIT_S = 30.0
LATE, AT = 2, 3
"""The rank that is late in most tests, and the step."""


MODEL = model_of().double()
with torch.random.fork_rng():
    torch.manual_seed(0)
    NORMED = nn.Sequential(deepcopy(MODEL), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def batch(rank, version):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * version + rank), dtype=torch.float64)


sgd = partial(small_models.sgd, lr=0.05)


def backward(model, rank, version):
    model.zero_grad()
    model(batch(rank, version)).square().mean().backward()


def trainee(world, algorithm, **options):
    return attached(world, deepcopy(MODEL), sgd, algorithm=algorithm, **options)


def at(replica):
    """The version of the weights that the next forward pass uses."""
    replica.drain()
    return replica.step


def all_are_equal(ends):
    return all(torch.equal(*pair) for end in ends for pair in zip(end, ends[0], strict=True))


@dataclass
class Progress:
    """How far the ranks of a test have come, so that one can be late without anybody sleeping."""

    passed: int = 0  # steps that somebody has passed
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, step):
        with self.changed:
            self.passed = max(self.passed, step)
            self.changed.notify_all()

    def tell_of(self, replica):
        """As `tell`; asks for the version on this rank without waiting for it, as `step` would."""
        self.tell(replica._standing.version)

    def wait_for(self, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.passed >= step, LIMIT_S)


class Loop:
    """A training loop of which rank `LATE` is late once, in step `AT`, until the others are `late_by` steps further."""

    def __init__(self, ranks=4, late_by=1, steps=8):
        self.ranks, self.steps, self.late_by = ranks, steps, late_by
        self.progress, self.late_is_there = Progress(), threading.Event()

    def run(self, body):
        return run_ranks(self.ranks, lambda world: body(self, world))

    def wait_for_who_is_late(self, *_):
        assert self.late_is_there.wait(LIMIT_S)


class Trainee:
    """One rank of a `Loop`: by default a copy of `MODEL`, stepped by SGD."""

    def __init__(self, loop, world, model=None, optimizer=None, **options):
        self.loop, self.rank = loop, world.rank
        self.model = deepcopy(MODEL) if model is None else model
        self.optimizer = optimizer or sgd(self.model)
        self.replica = commrt.attach(self.model, self.optimizer, commrt.BackupWorkers(1), world=world, **options)

    def wait(self):
        """Wait here, if late, until the others are gone; they wait until the late one has not been left behind."""
        if at(self.replica) != AT:
            return
        if self.rank == LATE:
            self.loop.late_is_there.set()
            self.loop.progress.wait_for(AT + self.loop.late_by)
        else:  # in the forward pass, where this rank's state may be copied by who was left behind
            self.replica.model.register_forward_pre_hook(self.loop.wait_for_who_is_late)

    def backward(self):
        self.wait()
        backward(self.model, self.rank, self.replica.step)

    def step(self):
        self.backward()
        self.optimizer.step()
        self.tell()

    def tell(self):
        self.loop.progress.tell_of(self.replica)

    def train(self, after_each=lambda: None, *, until=None):
        """Train until the weights have seen `until` updates, or those of the loop."""
        while at(self.replica) < (self.loop.steps if until is None else until):
            self.step()
            after_each()

    def train_to_the_late_step(self):
        """Afterwards one rank has just dropped its gradient, and the others have stepped with theirs."""
        self.train(until=AT)
        self.step()


def on_loop(make=Trainee, **options):
    """Run a test as each rank of a `Loop` with `options`; ``make(loop, world)`` returns the trainee that it takes."""

    def decorate(test):
        def all_ranks():
            Loop(**options).run(lambda loop, world: test(make(loop, world)))

        all_ranks.__name__ = test.__name__
        return all_ranks

    return decorate
