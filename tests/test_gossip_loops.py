# SPDX-License-Identifier: Apache-2.0
"""Training by gossip under loops that skip, accumulate, copy, compile, detach or run out of data."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
from cases import for_each, taking_turns
from gossip_models import (
    MODELS,
    STEPS,
    batch,
    local_step,
    model_of,
    optimizer_of,
    params,
    same,
    simulated,
    trained,
    trainee,
)
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
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        return [*saved.values()]

    assert all(map(same, run_ranks(2, body), simulated(Gossip(staleness=1), 2, steps=3)))


def test_a_rank_whose_optimizer_did_not_step_still_exchanges():
    """As under a `GradScaler` that met an infinity."""

    def body(world):
        model, optimizer, replica = trainee(world, Gossip(), bucket_cap_mb=1e-4)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, world.rank)).square().sum().backward()
            if (step, world.rank) not in {(2, 1), (6, 0)}:
                optimizer.step()
        model(batch(0, 0))  # the next forward pass
        return replica.step, replica.disagreement()

    outcomes = run_ranks(2, body)
    assert [step for step, _ in outcomes] == [STEPS] * 2
    assert max(apart for _, apart in outcomes) < 1e-6


def test_a_grad_scaler_that_skips_a_step_on_one_rank_keeps_nobody_waiting():
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(step, world.rank)).square().sum() * (float("inf") if (step, world.rank) == (1, 0) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.drain()
        model(batch(0, 0))
        return replica.step, scaler.get_scale(), replica.disagreement()

    (step, scale, apart), (other_step, other_scale, _) = run_ranks(2, body)
    assert (step, scale, other_step, other_scale) == (4, 2.0, 4, 4.0)
    assert apart < 1e-6


def test_accumulating_passes_exchange_once():
    def body(world):
        model, optimizer, replica = trainee(world, Gossip())
        for step in range(3):
            with replica.no_sync():
                model(batch(step, world.rank)).square().sum().backward()
            model(batch(step, 9)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return replica.step

    assert run_ranks(2, body) == [3, 3]


def test_copies_and_pickles_of_a_model_do_not_gossip():
    def body(world):
        model, _, replica = trainee(world, Gossip())
        copied = deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        model(batch(0, 0)).sum().backward()
        for other in (copied, loaded):
            other(batch(0, world.rank)).sum().backward()
        return replica.step

    assert run_ranks(2, body) == [0, 0]


def test_a_model_whose_parts_are_called_one_by_one_is_mixed_part_by_part():
    def body(world):
        model, optimizer, replica = trainee(world, Gossip(), bucket_cap_mb=1e-6)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, world.rank)
            for part in model:
                x = part(x)
            x.square().sum().backward()
            optimizer.step()
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(3, body), simulated(Gossip(), 3)))


@for_each("how", ["before", "after"])
def test_a_compiled_model_gossips_without_hooks(how):
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        compiled = torch.compile(model, backend="eager")
        replica = commrt.attach(compiled if how == "before" else model, optimizer, Gossip(), world=world)
        for step in range(STEPS):
            optimizer.zero_grad()
            compiled(batch(step, world.rank)).square().sum().backward()
            optimizer.step()
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(2, body), simulated(Gossip(), 2)))


class Functional(nn.Module):
    """Uses parameters that modules without a forward pass keep."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([param.detach().clone() for param in MODELS[0].parameters()])

    def forward(self, x):
        for weight, bias in zip(self.layers[0:4:2], self.layers[1:4:2], strict=True):
            x = torch.tanh(nn.functional.linear(x, weight, bias))
        return nn.functional.linear(x, self.layers[4], self.layers[5])


def test_parameters_of_modules_that_are_never_called_are_mixed_in_time():
    def body(world):
        model = Functional()
        optimizer = optimizer_of(model)
        replica = commrt.attach(model, optimizer, Gossip(), world=world, bucket_cap_mb=1e-4)
        for step in range(STEPS):
            local_step(model, optimizer, step, world.rank)
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(2, body), simulated(Gossip(), 2)))


def test_ranks_at_different_steps_are_told_so():
    def body(world):
        model = model_of()
        replica = commrt.attach(model, None, Gossip(rotate=False), world=world)
        replica._restart_at_step(world.rank)
        replica.average()
        replica.drain()

    with pytest.raises(DisagreementError, match="the ranks are at different steps"):
        run_ranks(2, body)


def test_a_parameter_that_came_later_is_refused():
    def body(world):
        model = model_of()
        replica = commrt.attach(model, None, Gossip(), world=world)
        model.append(nn.Linear(3, 3))
        replica.average()

    with pytest.raises(UsageError, match="the model has changed since attach"):
        run_ranks(2, body)


def test_a_detached_model_trains_alone_and_can_be_attached_again():
    def body(world):
        _, replica = trained(world, Gossip(), steps=2)
        replica.detach()
        model, optimizer = replica.model, replica._optimizers[0]
        local_step(model, optimizer, 0, world.rank)
        commrt.attach(model, optimizer, Gossip(), world=world)
        return replica.step

    assert run_ranks(2, body) == [2, 2]


@for_each(
    ("batches", "staleness"), taking_turns([(3, 6), (6, 3), (0, 4), (5, 5), (2, 6, 4), (4, 0, 0, 1), (2, 6, 4)], [0, 1])
)
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, staleness):
    def body(world):
        model = model_of()
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        replica = commrt.attach(model, optimizer, Gossip(staleness=staleness), world=world, bucket_cap_mb=1e-4)
        with replica.join(schedule):
            for step in range(batches[world.rank]):
                local_step(model, optimizer, step, world.rank)
                schedule.step()
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        return replica.step, replica.replicas_equal(), schedule.last_epoch, [m.sum().item() for m in momentum]

    outcomes = run_ranks(len(batches), body)
    assert [(step, equal, epoch) for step, equal, epoch, _ in outcomes] == [(max(batches), True, max(batches))] * len(
        batches
    )
    assert all(momentum == outcomes[0][3] for *_, momentum in outcomes)


def test_training_goes_on_after_join_and_can_be_joined_again():
    def body(world):
        model, optimizer, replica = trainee(world, Gossip())
        for _ in range(2):
            with replica.join():
                for step in range(1 + world.rank):
                    local_step(model, optimizer, step, world.rank)
            local_step(model, optimizer, 9, world.rank)
        replica.drain()
        return replica.step

    assert run_ranks(3, body) == [8, 8, 8]


def test_join_inside_join_is_refused():
    def body(world):
        replica = commrt.attach(model_of(), None, Gossip(), world=world)
        with replica.join(), replica.join():
            pass

    with pytest.raises(UsageError, match=r"join\(\) inside join\(\)"):
        run_ranks(1, body)
