# SPDX-License-Identifier: Apache-2.0
"""Where replicas may differ, running means and variances are averaged, and all other buffers stay each rank's own."""

from __future__ import annotations

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from local_loops import ends_equal
from small_models import backward, data, seeded, sgd, train, trainee
from torch import nn

import commrt
from commrt.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")

WAYS = [
    commrt.Gossip(),
    commrt.Gossip(staleness=1),
    commrt.local_sgd.LocalSGD(period=2),
    commrt.local_sgd.LocalSGD(period=2, delay=1),
    commrt.local_sgd.LocalSGD(period=2, inner=commrt.Gossip()),
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


NORMS = [
    lambda: nn.BatchNorm1d(8),
    lambda: nn.SyncBatchNorm(8),
    lambda: nn.InstanceNorm1d(8, track_running_stats=True),
]


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
