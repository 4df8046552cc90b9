# SPDX-License-Identifier: Apache-2.0
"""Gradients are means over ranks, whatever their layout, dtype or order."""

import pytest
import torch
from cases import for_each, on_ranks
from small_models import Branches, backward, data, gradients, local_gradients, mean_gradients, net, seeded, sgd, trainee
from torch import nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms import ring
from commrt.buckets.riders import riding_numel
from commrt.errors import UsageError
from commrt.kernels.layout import layout_of
from commrt.local_sgd import LocalSGD
from commrt.testing.ranks import run_ranks


@on_ranks(1)
def test_one_rank_changes_nothing_even_with_a_narrow_wire(world):
    model, _, _ = trainee(world, wire=torch.bfloat16)
    backward(model, 0)
    assert all(map(torch.equal, gradients(model), local_gradients(net(), 0)))


def test_the_busiest_rank_sends_what_the_proof_says():
    def body(world):
        model, _, replica = trainee(world)
        backward(model, world.rank)
        return replica.last.nbytes_sent

    elements = layout_of([param.numel() for param in net().parameters()], riding_numel(4)).numel
    sent = run_ranks(4, body)
    assert sum(sent) == 2 * 3 * elements * 4
    assert max(sent) <= 2 * 3 / 4 * elements * 4 + 4 * 16 * 4  # chunks are even to within a granule


@on_ranks(2)
def test_gradients_that_are_views_stay_views(world):
    model = net()
    counts = [param.numel() for param in model.parameters()]
    flat = torch.zeros(sum(counts))
    for param, part in zip(model.parameters(), flat.split(counts), strict=True):
        param.grad = part.view_as(param)
    commrt.attach(model, sgd(model), world=world)
    backward(model, world.rank)
    torch.testing.assert_close(flat, torch.cat([grad.flatten() for grad in mean_gradients(range(2))]))


@on_ranks(2)
def test_any_memory_format_is_averaged_by_position(world):
    model = seeded(lambda: nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    commrt.attach(model, sgd(model), world=world)
    images = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model(images[world.rank].to(memory_format=torch.channels_last)).square().mean().backward()
    alone = nn.Conv2d(3, 4, 3)
    alone.load_state_dict(model.state_dict())
    total = torch.zeros_like(alone.weight)
    for image in images:
        total += torch.autograd.grad(alone(image).square().mean(), alone.weight)[0] / 2
    torch.testing.assert_close(model.weight.grad, total)


@on_ranks(2)
def test_strides_of_axes_with_one_element_do_not_matter(world):
    model = seeded(lambda: nn.Conv2d(1, 4, 3))
    replica = commrt.attach(model, world=world)
    model.weight.grad = torch.full((4, 9), float(world.rank)).as_strided((4, 1, 3, 3), (9, 1, 3, 1))
    model.bias.grad = torch.ones(4)
    replica.average()
    assert model.weight.grad.unique().tolist() == [0.5]


@on_ranks(2)
def test_parameters_of_several_dtypes_travel_in_their_own_buckets(world):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()])
    replica = commrt.attach(model, sgd(model), world=world)
    x = torch.full((1, 4), float(world.rank + 1))
    sum(part(x.to(part.weight.dtype)).double().sum() for part in model).backward()
    assert len(replica.last.spans) == 3
    assert [part.weight.grad[0, 0].item() for part in model] == [1.5, 1.5, 1.5]


def test_gradients_travel_in_the_dtype_in_which_they_are_made():
    def body(world):
        model = seeded(Branches).bfloat16()
        model.uses_branch = world.rank == 1
        for param in model.parameters():
            param.grad_dtype = torch.float32
            param.register_hook(lambda grad: grad.float() * 1.001)  # no longer a bfloat16
        replica = commrt.attach(model, world=world)
        x, y = data(0)
        cross_entropy(model(x.bfloat16()), y).backward()
        return replica.buckets[0].wire.dtype, [param.grad for param in model.parameters() if param.grad is not None]

    (wire, ours), (_, theirs) = run_ranks(2, body)
    assert wire == torch.float32
    assert all(map(torch.equal, ours, theirs))
    for grad in ours:
        assert grad.dtype == torch.float32
        assert not torch.equal(grad.bfloat16().float(), grad)


@on_ranks(1)
def test_a_narrow_wire_is_chosen_by_the_gradients_dtype(world):
    model = net()
    for param in model.parameters():
        param.grad_dtype = torch.bfloat16
    replica = commrt.attach(model, world=world, wire=torch.float16)
    assert replica.buckets[0].wire.dtype == torch.bfloat16


@on_ranks(3)
def test_gradients_that_are_zero_everywhere_are_stepped_with(world):
    model, optimizer, replica = trainee(world)
    for factor in (1.0, 0.0, 0.0, 1.0):
        optimizer.zero_grad(set_to_none=False)
        (model(data(world.rank)[0]).sum() * factor).backward()
        optimizer.step()
    assert replica.replicas_equal()


class Backwards(nn.Module):
    """Layers that are registered in another order than they are used in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8)
        self.first = nn.Linear(6, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@on_ranks(2)
def test_buckets_follow_the_order_of_use_after_the_first_step(world):
    model = seeded(Backwards)
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, world=world, bucket_cap_mb=1e-4)
    layouts = []
    for step in range(3):
        layouts.append([{name.split(".")[0] for name in bucket.names} for bucket in replica.buckets])
        backward(model, world.rank, step)
        optimizer.step()
    assert replica.replicas_equal()
    assert layouts[0] == [{"first"}, {"middle"}, {"last"}]
    assert layouts[1] == layouts[2] == [{"last"}, {"middle"}, {"first"}]


@on_ranks(3)
def test_run_refuses_what_is_no_schedule_of_its_ranks(world):
    with pytest.raises(UsageError, match=r"Ring\(.*\) is no schedule: an algorithm makes one with its schedule"):
        world.run(commrt.Ring(), torch.ones(2))
    with pytest.raises(UsageError, match=r"of 2 ranks and the world has 3: .* schedule\.over"):
        world.run(ring.all_reduce(2), torch.ones(4))


@for_each(
    "algorithm",
    [commrt.Torus2D(), commrt.Gossip(), commrt.Gossip(payload="gradients"), LocalSGD(1), commrt.BackupWorkers(0)],
)
@on_ranks(2)
def test_a_loss_that_runs_through_a_submodule_trains_all_ranks_alike(world, algorithm):
    model = nn.Sequential(net())
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model[0], world.rank)  # past model.forward, where DDP would average nothing
        optimizer.step()
    replica.drain()
    assert replica.disagreement() < 1e-6
