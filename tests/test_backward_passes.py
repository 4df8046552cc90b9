# SPDX-License-Identifier: Apache-2.0
"""Backward passes that are missing, interrupted, repeated, held back or stepped in the middle, or in a closure."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, gradients, local_gradients, net, train, trainee
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.errors import DisagreementError, PeerLost, TransportClosed, TransportError, UsageError
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.ranks import run_ranks


@on_ranks(2)
def test_a_scaler_skips_the_step_on_all_ranks_or_none(world):
    model, optimizer, replica = trainee(world)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(world.rank, step)
        loss = cross_entropy(model(x), y) * (float("inf") if (world.rank, step) == (1, 2) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert (replica.replicas_equal(), scaler.get_scale()) == (True, 2.0)


@for_each("bucket", [0, 1])
def test_a_failing_transfer_ends_every_rank_with_its_place_and_nothing_runs_after(bucket):
    def body(world):
        model, optimizer, _ = trainee(world, bucket_cap_mb=1e-4)
        train(model, optimizer, world.rank, steps=2)
        with pytest.raises(TransportError, match="an injected failure") as caught:
            backward(model, world.rank, 2)
        with pytest.raises(TransportClosed, match="an earlier transfer failed"):
            backward(model, world.rank, 3)
        return caught.value.place

    places = run_ranks(3, body, wrap=with_faults(fail_at(rank=1, step=2, bucket=bucket)))
    assert [(at.rank, at.step, at.bucket) for at in places] == [(rank, 2, bucket) for rank in range(3)]


def interrupt(model, rank):
    """A backward pass that an error of the user's ends."""
    handle = model[2].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, rank)
    handle.remove()
    model.zero_grad()


@for_each("cap_mb", [1e-9, 25])
@on_ranks(2)
def test_an_interrupted_backward_pass_is_neither_continued_nor_stepped_with(world, cap_mb):
    model, optimizer, _ = trainee(world, bucket_cap_mb=cap_mb)
    interrupt(model, world.rank)
    with pytest.raises(UsageError, match="if an error interrupted it, the other ranks wait for the rest"):
        optimizer.step()
    world.comm_thread.submit(lambda: None).result()  # what left before the error has arrived
    world.agree("all are here")
    with pytest.raises(UsageError, match="inside or after one that did not end"):
        model[0].weight.sum().backward()  # which the other one had not come to


@on_ranks(2)
def test_a_pass_is_refused_after_one_that_could_not_begin(world):
    model, _, replica = trainee(world)
    for _ in range(2):
        backward(model, world.rank)
    with mock.patch.object(replica._guard, "close", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        backward(model, world.rank)
    with pytest.raises(UsageError, match="inside or after one that did not end"):
        model[0].weight.sum().backward()


@on_ranks(1)
def test_one_rank_alone_goes_on_after_an_interrupted_backward_pass(world):
    model, _, replica = trainee(world)
    interrupt(model, 0)
    model[0].weight.sum().backward()
    assert replica.step == 1
    model.zero_grad()
    backward(model, 0)
    assert replica.step == 2
    assert all(map(torch.equal, gradients(model), local_gradients(net(), 0)))


@on_ranks(2)
def test_optimizers_that_step_in_the_middle_of_a_backward_pass_are_refused(world):
    model, optimizer, _ = trainee(world)
    model[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match=r"while gradients are being averaged: step after backward"):
        backward(model, world.rank)


@on_ranks(1)
def test_alone_a_backward_pass_may_be_stepped_in_the_middle_as_without_us(world):
    model, optimizer, _ = trainee(world)
    model[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    backward(model, 0)


@on_ranks(3)
def test_a_scaler_that_skips_where_gradients_are_gossiped_is_named_on_all_ranks(world):
    model, optimizer, _ = trainee(world, algorithm=commrt.Gossip(payload="gradients"))
    scaler = torch.amp.GradScaler("cpu")

    def train():
        for step in range(4):
            x = torch.full((2, 6), torch.inf if (world.rank, step) == (1, 1) else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises((DisagreementError, PeerLost), match="GradScaler"):
        train()


# Gradients held back by no_sync(), and optimizers that step with a closure.


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
