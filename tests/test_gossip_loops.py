# SPDX-License-Identifier: Apache-2.0
"""Training by gossip under loops that save, copy, compile or take the model apart: the bits of the simulation."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
from cases import for_each, on_ranks
from gossip_models import MODELS, STEPS, batch, local_step, model_of, optimizer_of, params, same, simulated, trainee
from torch import nn

import commrt
from commrt.algorithms.gossip import Gossip
from commrt.errors import DisagreementError, UsageError
from commrt.testing.ranks import run_ranks


def test_saving_a_model_waits_for_what_is_under_way():
    def body(world):
        model, optimizer, _ = trainee(world, Gossip(staleness=1), bucket_cap_mb=1e-4)
        for step in range(3):
            local_step(model, optimizer, step, world.rank)
        return [value.clone() for value in model.state_dict().values()]

    assert all(map(same, run_ranks(2, body), simulated(Gossip(staleness=1), 2, steps=3)))


@on_ranks(2)
def test_the_next_forward_pass_exchanges_a_step_that_no_optimizer_took(world):
    """As under a `GradScaler` that met an infinity."""
    model, optimizer, replica = trainee(world, Gossip(), bucket_cap_mb=1e-4)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, world.rank)).square().sum().backward()
        if (step, world.rank) not in {(2, 1), (STEPS - 1, 0)}:
            optimizer.step()
    model(batch(0, 0))
    assert replica.step == STEPS
    assert replica.disagreement() < 1e-6


@on_ranks(2)
def test_copies_and_pickles_of_a_model_do_not_gossip(world):
    model, _, replica = trainee(world, Gossip())
    copied = deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    model(batch(0, 0)).sum().backward()
    for other in (copied, loaded):
        other(batch(0, world.rank)).sum().backward()
    assert replica.step == 0


class Functional(nn.Module):
    """Uses parameters that modules without a forward pass keep."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([param.detach().clone() for param in MODELS[0].parameters()])

    def forward(self, x):
        for weight, bias in zip(self.layers[0:4:2], self.layers[1:4:2], strict=True):
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return nn.functional.linear(x, self.layers[4], self.layers[5])


def whole(model):
    return model, model


def part_by_part(model):
    """Calls the parts, never the module that is attached."""

    def call(x):
        for part in model:
            x = part(x)
        return x

    return model, call


def compiled_before_attach(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, compiled


def compiled_after_attach(model):
    return model, torch.compile(model, backend="eager")


@for_each(
    ("make", "prepare", "ranks"),
    [
        (model_of, part_by_part, 3),
        (Functional, whole, 2),
        (model_of, compiled_before_attach, 2),
        (model_of, compiled_after_attach, 2),
    ],
)
def test_parameters_are_mixed_in_time_however_the_model_is_called(make, prepare, ranks):
    def body(world):
        model = make()
        optimizer = optimizer_of(model)
        attached, call = prepare(model)
        replica = commrt.attach(attached, optimizer, Gossip(), world=world, bucket_cap_mb=1e-6)
        for step in range(STEPS):
            local_step(call, optimizer, step, world.rank)
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(ranks, body), simulated(Gossip(), ranks)))


def test_ranks_at_different_steps_are_told_so():
    def body(world):
        replica = trainee(world, Gossip(rotate=False))[2]
        replica._restart_at_step(world.rank)
        replica.average()
        replica.drain()

    with pytest.raises(DisagreementError, match="the ranks are at different steps"):
        run_ranks(2, body)


@on_ranks(2)
def test_a_parameter_that_came_later_is_refused(world):
    model, _, replica = trainee(world, Gossip())
    model.append(nn.Linear(3, 3))
    with pytest.raises(UsageError, match="the model has changed since attach"):
        replica.average()
