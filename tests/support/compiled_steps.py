# SPDX-License-Identifier: Apache-2.0
"""Ranks whose optimizer step is compiled, or not: processes, as torch tells all threads that one of them compiles."""

from __future__ import annotations

import torch

import commrt


def trained(_, algorithm, compiled):
    """The weights after a few steps, as lists."""
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
