# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step that `torch.compile` compiles exchanges as one that it does not."""

from __future__ import annotations

import pytest
import torch

import commrt
from commrt.testing.ranks import run_ranks

ALGORITHMS = {"gossip": commrt.Gossip(), "local SGD": commrt.LocalSGD(2, outer=commrt.Nesterov())}


def trained(world, algorithm, compiled):
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8).view(2, 4))
        model.bias.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(4):
        model(torch.ones(3, 4) * (world.rank + 1)).square().sum().backward()
        step()
        optimizer.zero_grad()
    replica.consolidate()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.slow  # torch imports all of its compiler
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_compiled_step_exchanges_as_one_that_is_not(algorithm):
    expected, found = (run_ranks(2, lambda world, how=how: trained(world, algorithm, how)) for how in (False, True))
    for eager, compiled in zip(expected, found, strict=True):
        assert all(map(torch.equal, eager, compiled))
