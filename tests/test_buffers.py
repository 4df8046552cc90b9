# SPDX-License-Identifier: Apache-2.0
"""Buffers such as statistics of batch norm are those of rank 0 after each step."""

from __future__ import annotations

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, net, trainee
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import commrt
from commrt.errors import UsageError
from commrt.testing.ranks import run_ranks


@on_ranks(3)
def test_buffers_are_rank_zeros_after_each_step_and_a_second_backward_still_works(world):
    model, optimizer, replica = trainee(world, nn.BatchNorm1d(8))
    x, y = data(world.rank)
    loss = cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    alone = net(nn.BatchNorm1d(8))
    alone(data(0)[0])
    assert replica.replicas_equal()
    assert all(map(torch.equal, model.buffers(), alone.buffers()))


class Gathering(nn.Module):
    """Multiplies its weight by all that it has been given so far."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, more):
        self.total = self.total + more
        return (self.weight * self.total).sum()


@on_ranks(2)
def test_a_graph_that_needs_the_buffers_that_were_overwritten_ends_in_an_error(world):
    model = Gathering()
    commrt.attach(model, world=world)
    first, second = model(1.0 + world.rank), model(10.0 * (1 + world.rank))
    first.backward()
    if world.rank == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
    assert model.total.tolist() == [11.0] * 3


@on_ranks(2)
def test_a_graph_may_run_again_where_overwriting_changed_nothing(world):
    model = Gathering()
    replica = commrt.attach(model, world=world)
    loss = model(2.0)
    loss.backward(retain_graph=True)
    replica.sync_buffers()
    loss.backward()
    assert model.weight.grad.tolist() == [4.0] * 3


@on_ranks(2)
def test_statistics_that_a_graph_reads_are_not_overwritten_behind_its_back(world):
    model = net(nn.BatchNorm1d(8))
    commrt.attach(model, world=world)
    x, y = data(world.rank)
    trained = cross_entropy(model(x), y)
    model.eval()
    read = cross_entropy(model(x), y)
    trained.backward()
    if world.rank == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            read.backward()


@on_ranks(2)
def test_buffers_can_be_left_alone_and_made_equal_on_request(world):
    model, _, replica = trainee(world, nn.BatchNorm1d(8), broadcast_buffers=False)
    backward(model, world.rank)
    before = replica.replicas_equal()
    replica.sync_buffers()
    assert (before, replica.replicas_equal()) == (False, True)


@on_ranks(2)
def test_activation_checkpointing_with_reentrance_is_refused(world):
    model, _, _ = trainee(world)
    x, y = data(world.rank)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        cross_entropy(model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)), y).backward()


@on_ranks(2)
def test_a_buffer_that_changed_its_dtype_is_refused(world):
    model, _, _ = trainee(world, nn.BatchNorm1d(8))
    model[2].num_batches_tracked = model[2].num_batches_tracked.int()
    with pytest.raises(UsageError, match=r"have changed since attach\(\), now .*num_batches_tracked torch\.int32"):
        model(data(world.rank)[0]).sum().backward()


@for_each("ranks", [1, 2])
def test_buffers_that_change_during_the_backward_pass_keep_their_changes(ranks):
    def body(world):
        model = net()
        model.register_buffer("passes", torch.zeros(()))
        replica = commrt.attach(model, world=world)
        model[0].weight.register_hook(lambda _: model.passes.add_(1) and None)
        for step in range(3):
            backward(model, world.rank, step)
        return model.passes.item(), replica.replicas_equal()

    assert run_ranks(ranks, body) == [(3.0, True)] * ranks
