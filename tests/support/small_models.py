# SPDX-License-Identifier: Apache-2.0
"""Small models, data and gradients that tests of attached models share."""

from threading import Lock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import commrt

ONE_SEED_AT_A_TIME = Lock()
"""Threads share torch's generator."""


def seeded(make):
    with ONE_SEED_AT_A_TIME:
        torch.manual_seed(0)
        return make()


def net(*extra):
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3)))


class Branches(nn.Module):
    """Has a layer that only ranks with `uses_branch` use, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.nobody, self.somebody = nn.Linear(8, 8), nn.Linear(6, 3)
        self.uses_branch = False

    def forward(self, x):
        out = self.last(torch.tanh(self.first(x)))
        return out + self.somebody(x) if self.uses_branch else out


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def attached(world, model, make=sgd, **options):
    optimizer = make(model)
    return model, optimizer, commrt.attach(model, optimizer, world=world, **options)


def trainee(world, *extra, **options):
    return attached(world, net(*extra), **options)


def data(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def backward(model, rank, step=0):
    x, y = data(rank, step)
    cross_entropy(model(x), y).backward()


def gradients(model):
    return [param.grad.clone() for param in model.parameters()]


def local_gradients(model, rank):
    alone = net(*list(model)[2:-1])
    alone.load_state_dict(model.state_dict())
    backward(alone, rank)
    return gradients(alone)


def mean_gradients(ranks, step=0):
    """What the `ranks` must end with after `backward` on a new `net`."""
    each = []
    for rank in ranks:
        alone = net()
        backward(alone, rank, step)
        each.append(gradients(alone))
    return [sum(parts) / len(parts) for parts in zip(*each, strict=True)]


def train(model, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def train_scaled(model, optimizer, scaler, rank, steps=5, after_each=lambda: None):
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(rank, step)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        after_each()


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def zero(param):
    param.grad = None
