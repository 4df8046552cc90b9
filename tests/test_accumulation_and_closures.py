# SPDX-License-Identifier: Apache-2.0
"""Gradients held back by no_sync(), and optimizers that step with a closure."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, local_gradients, net, trainee

import commrt
from commrt.errors import DisagreementError, UsageError


@for_each("in_closure", [False, True])
@on_ranks(2)
def test_step_refuses_gradients_that_no_sync_held_back(world, in_closure):
    model, optimizer, replica = trainee(world)

    def hold_back():
        with replica.no_sync():
            backward(model, world.rank)

    if not in_closure:
        hold_back()
    with pytest.raises(UsageError, match=r"never averaged: the last backward pass of an accumulation must be"):
        optimizer.step(hold_back if in_closure else None)
    assert all(map(torch.equal, model.parameters(), net().parameters()))
    backward(model, world.rank)
    optimizer.step()
    assert replica.replicas_equal()


@on_ranks(2)
def test_a_rank_without_a_micro_batch_averages_nothing_in_no_sync(world):
    model, optimizer, replica = trainee(world)
    for step in range(6):
        with nullcontext() if step % 2 else replica.no_sync():
            replica.average() if world.rank == 1 and step in (2, 5) else backward(model, world.rank, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert (replica.replicas_equal(), replica.step) == (True, 3)


@on_ranks(3)
def test_gradients_made_by_hand_are_averaged_when_all_ranks_step_without_a_closure(world):
    model, optimizer, replica = trainee(world)
    for param in model.parameters():
        param.grad = torch.full_like(param, world.rank)
    optimizer.step(closure=None)
    assert (replica.replicas_equal(), model[0].weight.grad.unique().tolist()) == (True, [1.0])


@for_each("by_name", [False, True])
@on_ranks(2)
def test_a_closure_that_fills_gradients_without_a_backward_pass_is_refused_before_the_step(world, by_name):
    model, optimizer, replica = trainee(world)
    backward(model, world.rank)
    optimizer.step()
    before = [param.clone() for param in model.parameters()]

    def closure():
        for param, grad in zip(model.parameters(), local_gradients(model, world.rank), strict=True):
            param.grad = grad

    with pytest.raises(UsageError, match=r"a closure that made gradients which were never averaged: call loss"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step(lambda: (closure(), replica.average()))
    assert replica.replicas_equal()


@on_ranks(2)
def test_a_closure_may_return_what_was_computed_before_or_nothing_at_all(world):
    model, optimizer, replica = trainee(world)
    backward(model, world.rank)
    assert optimizer.step(lambda: 7) == 7
    optimizer.zero_grad()
    optimizer.step(lambda: None)  # all ranks leave this batch out
    assert (replica.replicas_equal(), [param.grad for param in model.parameters()]) == (True, [None] * 4)


@for_each("zeroed", [None, {"set_to_none": True}, {"set_to_none": False}])
@for_each(("closure", "gradients"), [(None, "own"), (lambda: None, "own"), (None, "views")])
@on_ranks(3)
def test_a_rank_that_steps_alone_without_a_backward_pass_is_told_on_every_rank(world, zeroed, closure, gradients):
    model, optimizer, _ = trainee(world, gradients=gradients)
    for _ in range(2 if zeroed else 0):
        backward(model, world.rank)
        optimizer.step()
        optimizer.zero_grad(**zeroed)
    if zeroed:
        backward(model, world.rank)
        optimizer.zero_grad(**zeroed)  # all ranks leave this step out
    before = model[0].weight.clone()
    with pytest.raises(DisagreementError, match=r"without a backward pass .*: call replica\.average\(\)"):
        optimizer.step(closure) if world.rank == 1 else backward(model, world.rank)
    assert torch.equal(model[0].weight, before)


class Deaf(torch.optim.SGD):
    """Does not call its closure."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)


@on_ranks(2)
def test_a_closure_that_is_not_called_does_not_hide_gradients_that_were_held_back(world):
    model = net()
    optimizer = Deaf(model.parameters(), lr=0.1)
    replica = commrt.attach(model, optimizer, world=world)
    with replica.no_sync():
        backward(model, world.rank)
    with pytest.raises(UsageError, match="parameters have changed already: load a checkpoint"):
        optimizer.step(lambda: None)


@on_ranks(2)
def test_gradients_that_were_held_back_and_then_dropped_are_forgotten(world):
    model, optimizer, replica = trainee(world)
    with replica.no_sync():
        backward(model, world.rank)
    optimizer.zero_grad()
    optimizer.step()
    assert replica.replicas_equal()
