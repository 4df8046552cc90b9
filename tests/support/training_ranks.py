# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes of their own: one detaches first, or all compile the optimizer's step."""

from __future__ import annotations

from threading import Event

import torch

import commrt


def detached_first(_, algorithm, has_detached):
    """Rank 0, which holds the store, detaches and closes; after a while the others ask for a mean."""
    with commrt.init(timeout_s=10) as world:
        model = torch.nn.Linear(3, 1)
        replica = commrt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, world=world)
        if world.rank:
            while not has_detached.exists():
                Event().wait(0.01)
            Event().wait(0.3)  # rank 0's process would have ended by then
            replica.disagreement()
        replica.detach()
        has_detached.touch()


def with_compiled_step(_, algorithm, compiled):
    """The weights after a few steps; torch tells all threads of a process that one of them compiles."""
    with commrt.init(60.0) as world:
        model = torch.nn.Linear(4, 2)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
            model.bias.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = commrt.attach(model, optimizer, algorithm, world=world)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(4):
            model(torch.ones(3, 4) * (world.rank + 1)).square().sum().backward()
            step()
            optimizer.zero_grad()
        replica.consolidate()
        return [param.tolist() for param in model.parameters()]
