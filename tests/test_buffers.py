# SPDX-License-Identifier: Apache-2.0
"""Buffers such as statistics of batch norm are those of rank 0 after each step, or the means of all ranks."""

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from local_loops import ends_equal
from small_models import backward, data, net, seeded, sgd, train, trainee
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


# Where replicas may differ, running means and variances are averaged, and all other buffers stay each rank's own.

WAYS = [
    commrt.Gossip(),
    commrt.Gossip(staleness=1),
    commrt.LocalSGD(period=2),
    commrt.LocalSGD(period=2, delay=1),
    commrt.LocalSGD(period=2, inner=commrt.Gossip()),
]


class Keeps(nn.Module):
    """Has buffers as masks, codebooks and observers have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(8))
        self.register_buffer("causal", torch.full((3,), float("-inf")))
        self.register_buffer("cluster_size", torch.zeros(8))
        self.register_buffer("min_val", torch.tensor(float("inf")))

    def forward(self, x):
        with torch.no_grad():
            self.mask = (x.mean(0) > 0).float()
            self.cluster_size.mul_(0.9).add_((x > 0).float().sum(0))
            self.min_val.copy_(torch.minimum(self.min_val, x.min()))
        return x


def trained(world, algorithm, *extra, steps=5):
    model, optimizer, replica = trainee(world, *extra, algorithm=algorithm)
    train(model, optimizer, world.rank, steps)
    replica.drain()
    return model, replica


def buffers_of(model):
    return [buffer.clone() for buffer in model.buffers()]


@for_each("algorithm", WAYS)
def test_masks_codebooks_and_observers_stay_each_ranks_own_and_become_rank_zeros(algorithm):
    def body(world):
        model, replica = trained(world, algorithm, Keeps())
        before = buffers_of(model)
        replica.consolidate()
        assert replica.replicas_equal()
        return before, buffers_of(model)

    (own, first), (other, second) = run_ranks(2, body)
    assert all(map(torch.equal, first, own))
    assert all(map(torch.equal, second, own))
    for mask, causal, _, _ in (own, other):
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert causal.isinf().all()
    assert not torch.equal(own[2], other[2])


NORMS = [lambda: nn.BatchNorm1d(8), lambda: nn.SyncBatchNorm(8), lambda: nn.InstanceNorm1d(8, track_running_stats=True)]


@for_each(("algorithm", "norm"), taking_turns(WAYS, NORMS))
@on_ranks(2)
def test_running_means_and_variances_become_the_mean_of_all_ranks(world, algorithm, norm):
    layer, beside = norm(), nn.Identity()
    beside.norm = layer  # in the model, and never called
    _, replica = trained(world, algorithm, beside)
    with torch.no_grad():
        layer.running_mean.fill_(world.rank)
        layer.running_var.fill_(2.0 + world.rank)
    replica.consolidate()
    assert (layer.running_mean.unique().tolist(), layer.running_var.unique().tolist()) == ([0.5], [2.5])


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@on_ranks(2)
def test_weights_that_a_hook_computes_before_forward_are_of_mixed_parameters(world):
    model = seeded(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3))))
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, commrt.Gossip(rotate=False), world=world)
    train(model, optimizer, world.rank, steps=3)
    model.eval()(data(0)[0])
    used = model[0].weight.clone()
    replica.drain()
    model(data(0)[0])
    assert torch.equal(used, model[0].weight)


@ends_equal(2)
def test_buffers_that_were_made_equal_while_gossip_is_in_flight_stay_so(world):
    model, optimizer, replica = trainee(world, nn.BatchNorm1d(8), algorithm=commrt.Gossip())
    backward(model, world.rank)
    optimizer.step()
    replica.sync_buffers()
    before = buffers_of(model)
    replica.drain()
    assert all(map(torch.equal, before, buffers_of(model)))
    return before
