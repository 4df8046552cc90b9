# SPDX-License-Identifier: Apache-2.0
"""With gradients="views" gradients live in what travels, and training goes on as with gradients of their own."""

from unittest import mock

import pytest
import torch
from cases import for_each, on_ranks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import Branches, backward, data, gradients, mean_gradients, net, seeded, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from transports import over_nccl

import commrt
from commrt.errors import UsageError
from commrt.kernels import torch_packing
from commrt.testing.ranks import run_ranks


def attached(world, model, **options):
    return commrt.attach(model, sgd(model), world=world, gradients="views", bucket_cap_mb=1e-4, **options)


def memory(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@on_ranks(3)
def test_gradients_are_the_mean_over_ranks_and_lie_in_what_travels(world):
    model = net()
    replica = attached(world, model)
    for step in range(3):
        model.zero_grad()
        backward(model, world.rank)
        if step:  # the first one rebuilds the buckets
            assert memory(param.grad for param in model.parameters()) == memory(
                bucket.wire for bucket in replica.buckets
            )
    torch.testing.assert_close(gradients(model), mean_gradients(range(3)))


def keep(model):
    """Accumulate onto the averages."""


def zero_in_place(model):
    model.zero_grad(set_to_none=False)


def clip_and_drop_some(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    model[0].weight.grad = None
    model[2].bias.grad.zero_()


def clone(model):
    for param in model.parameters():
        param.grad = param.grad.clone()


def zero_under_another_name(model):
    for param in model.parameters():
        if param.grad._base is None:  # detached views of one tensor count each other's writes
            param.grad = param.grad.detach()
        param.grad.zero_()


def point_elsewhere(model):
    for param in model.parameters():
        param.grad.data = param.grad.data.clone()


LOOPS = (nn.Module.zero_grad, keep, zero_in_place, clip_and_drop_some, clone, zero_under_another_name, point_elsewhere)
PASSES = ("backward", "accumulated", "by hand", "without the first layer", "scaled", "nothing on one rank")


def run_pass(kind, model, replica, optimizer, step, rank):
    if kind == "accumulated":
        with replica.no_sync():
            backward(model, rank, step + 50)
    if kind == "by hand":
        for param in model.parameters():
            param.grad = torch.full_like(param, rank + 0.1)
        replica.average()
    elif kind == "without the first layer":
        x, y = data(rank, step)
        cross_entropy(model[2](torch.tanh(x.new_ones(5, 8) * x.mean())), y).backward()
    elif kind == "scaled":
        x, y = data(rank, step)
        (4 * cross_entropy(model(x), y)).backward()
        for param in model.parameters():
            param.grad.div_(4)
    elif kind == "nothing on one rank" and rank == step % 2:
        replica.average()
    else:
        backward(model, rank, step)
    optimizer.step()


def trained(world, kind, loop, algorithm, wire):
    model = net()
    optimizer = sgd(model)
    options = {"gradients": kind, "wire": wire, "bucket_cap_mb": 1e-4, "broadcast_buffers": False}
    replica = commrt.attach(model, optimizer, algorithm, world=world, **options)
    for step, (prepare, made) in enumerate(loop):
        if all(param.grad is not None for param in model.parameters()):
            prepare(model)
        run_pass(made, model, replica, optimizer, step, world.rank)
    assert replica.replicas_equal()
    return [param.detach().clone() for param in model.parameters()]


LOOP = st.lists(st.tuples(st.sampled_from(LOOPS), st.sampled_from(PASSES)), min_size=2, max_size=6)
CARRIED = st.sampled_from([(commrt.Torus2D(), None), (commrt.Direct(), None), (commrt.Direct(), commrt.Int8())])


@given(loop=LOOP, carried=CARRIED, ranks=st.integers(1, 4), small=st.sampled_from([0, torch_packing.SMALL_NUMEL]))
@example(
    loop=[(keep, "backward"), (clone, "accumulated"), (zero_under_another_name, "scaled"), (keep, "by hand")],
    carried=(commrt.Direct(), commrt.Int8()),
    ranks=3,
    small=0,
)
@settings(max_examples=7, deadline=None)
def test_any_loop_trains_bit_by_bit_as_with_gradients_of_their_own(loop, carried, ranks, small):
    """Large gradients move to the wire one by one, and small ones together."""
    with mock.patch.object(torch_packing, "SMALL_NUMEL", small):
        with_views, with_own = (
            run_ranks(ranks, lambda world, kind=kind: trained(world, kind, loop, *carried)) for kind in ("views", "own")
        )
    for views, own in zip(with_views, with_own, strict=True):
        assert all(map(torch.equal, views, own))


@for_each("connect", [None, over_nccl], ids=["threads", "nccl"])
def test_a_gradient_that_only_another_rank_has_appears_in_what_travels(connect):
    def body(world):
        model = seeded(Branches)
        model.uses_branch = world.rank == 1
        replica = attached(world, model)
        for step in range(2):  # the first one rebuilds the buckets
            backward(model, world.rank, step)
            point_elsewhere(model.somebody)
            model.zero_grad()
        backward(model, world.rank, 2)
        assert model.nobody.weight.grad is None
        assert memory([model.somebody.weight.grad]) <= memory(bucket.wire for bucket in replica.buckets)
        return model.somebody.weight.grad.clone()

    first, *others = run_ranks(3, body, connect=connect)
    assert all(torch.equal(each, first) and each.any() for each in others)


def exchange(first, second):
    first.grad, second.grad = second.grad, first.grad


def overlap(first, second):
    first.grad = second.grad.flatten()[3:19].view(4, 4)


@for_each(("rows", "give"), [(4, exchange), (8, overlap)])
@on_ranks(2)
def test_a_gradient_in_memory_of_another_one_is_refused(world, rows, give):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, rows, bias=False))
    attached(world, model)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    give(*model.parameters())
    with pytest.raises(UsageError, match=r"was given memory of another gradient that travels: use a \.clone\(\)"):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_graph_that_saved_a_gradient_cannot_be_differentiated_after_the_next_step(world):
    model, rate = net(), torch.tensor(0.1, requires_grad=True)
    attached(world, model)
    for step in range(3):
        model.zero_grad()
        backward(model, world.rank, step)
        if step == 1:
            saved = (rate * model[0].weight.grad).pow(2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved, rate)


@on_ranks(2)
def test_a_graph_of_gradients_is_refused(world):
    attached(world, model := net())
    x, y = data(world.rank)
    with pytest.raises(UsageError, match="create_graph=True"):
        cross_entropy(model(x), y).backward(create_graph=True)
