# SPDX-License-Identifier: Apache-2.0
"""With gradients="views" gradients live in what travels, and training goes on as with gradients of their own."""

from __future__ import annotations

import pytest
import torch
from cases import for_each, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import backward, data, gradients, local_gradients, net, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from transports import over_nccl

import commrt
from commrt.errors import DisagreementError, UsageError
from commrt.kernels.layout import layout_of
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks


def homes_of(replica):
    return [original for bucket in replica.buckets for original in bucket._originals]


def addresses(model):
    return {param.grad.data_ptr() for param in model.parameters()}


def attached(world, model, **options):
    return commrt.attach(model, sgd(model), world=world, gradients="views", bucket_cap_mb=1e-4, **options)


def test_gradients_are_the_mean_over_ranks_and_lie_in_what_travels():
    def body(world):
        model = net()
        replica = attached(world, model)
        for step in range(3):
            model.zero_grad()
            backward(model, world.rank)
            if step:  # the first one rebuilds the buckets
                assert addresses(model) == {home.data_ptr() for home in homes_of(replica)}
        return gradients(model)

    expected = [sum(parts) / 3 for parts in zip(*(local_gradients(net(), rank) for rank in range(3)), strict=True)]
    for mine in run_ranks(3, body):
        for got, want in zip(mine, expected, strict=True):
            torch.testing.assert_close(got, want)


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


def share(model):
    """Let all gradients be views of one tensor."""
    counts = [param.numel() for param in model.parameters()]
    flat = torch.cat([param.grad.flatten() for param in model.parameters()])
    for param, part in zip(model.parameters(), flat.split(counts), strict=True):
        param.grad = part.view_as(param)


def point_elsewhere(model):
    for param in model.parameters():
        param.grad.data = param.grad.data.clone()


def there_and_back(model):
    model.double()
    model.float()


LOOPS = (
    nn.Module.zero_grad,
    keep,
    zero_in_place,
    clip_and_drop_some,
    clone,
    share,
    point_elsewhere,
    there_and_back,
)
PASSES = ("backward", "accumulated", "by hand", "without the first layer", "scaled", "nothing on one rank")


def run_pass(kind, model, replica, optimizer, step):
    rank = replica._world.rank
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


def trained(world: World, kind, loop, algorithm, wire):
    model = net()
    optimizer = sgd(model)
    replica = commrt.attach(
        model, optimizer, algorithm, world=world, gradients=kind, wire=wire, bucket_cap_mb=1e-4, broadcast_buffers=False
    )
    for step, (prepare, made) in enumerate(loop):
        if all(param.grad is not None for param in model.parameters()):
            prepare(model)
        run_pass(made, model, replica, optimizer, step)
    assert replica.replicas_equal()
    return [param.detach().clone() for param in model.parameters()]


LOOP = st.lists(st.tuples(st.sampled_from(LOOPS), st.sampled_from(PASSES)), min_size=2, max_size=6)
CARRIED = st.sampled_from(
    [(commrt.Torus2D(), None), (commrt.Direct(), None), (commrt.Direct(), commrt.quantization.Int8())]
)


@given(loop=LOOP, carried=CARRIED, ranks=st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_any_loop_trains_bit_by_bit_as_with_gradients_of_their_own(loop, carried, ranks):
    with_views, with_own = (
        run_ranks(ranks, lambda world, kind=kind: trained(world, kind, loop, *carried)) for kind in ("views", "own")
    )
    for views, own in zip(with_views, with_own, strict=True):
        assert all(map(torch.equal, views, own))


def test_a_gradient_of_an_earlier_step_changes_with_the_next_one():
    def body(world):
        model = net()
        attached(world, model)
        backward(model, world.rank)
        model.zero_grad()
        backward(model, world.rank)
        earlier = model[0].weight.grad
        model.zero_grad()
        backward(model, world.rank, step=1)
        return earlier is model[0].weight.grad

    assert run_ranks(2, body) == [True, True]


@for_each("connect", [None, over_nccl], ids=["threads", "nccl"])
def test_a_gradient_that_only_another_rank_has_appears_in_what_travels(connect):
    def body(world):
        model = net()
        model.nobody, model.somebody = nn.Linear(8, 8), nn.Linear(6, 3)
        replica = attached(world, model)
        for step in range(2):
            model.zero_grad()
            x, y = data(world.rank, step)
            out = model[2](model[1](model[0](x)))
            if world.rank == 1:
                out = out + model.somebody(x)
            cross_entropy(out, y).backward()
        inside = model.somebody.weight.grad.data_ptr() in {home.data_ptr() for home in homes_of(replica)}
        return model.nobody.weight.grad, inside, model.somebody.weight.grad.clone()

    results = run_ranks(3, body, connect=connect)
    assert [(nobody, inside) for nobody, inside, _ in results] == [(None, True)] * 3
    assert all(torch.equal(each, results[1][2]) for *_, each in results)
    assert results[0][2].abs().sum() > 0


def test_ranks_that_run_out_of_data_leave_the_rest_with_their_mean():
    def body(world):
        model = net()
        replica = attached(world, model)
        seen = []
        with replica.join():
            for step in range(1 + 2 * (world.rank == 1)):
                model.zero_grad()
                backward(model, world.rank, step)
                seen.append(gradients(model))
        assert replica.replicas_equal()
        return seen

    last = run_ranks(3, body)[1][-1]
    for got, want in zip(last, alone(2), strict=True):
        torch.testing.assert_close(got, want)


def alone(step, rank=1):
    model = net()
    backward(model, rank, step)
    return gradients(model)


def double(param):
    param.grad.mul_(2)


CHANGES = {
    "multiplies": double,
    "removes": lambda param: setattr(param, "grad", None),
    "replaces": lambda param: setattr(param, "grad", param.grad.clone()),
    "points elsewhere": lambda param: setattr(param.grad, "data", param.grad.data.clone()),
}


@for_each("change", CHANGES.values(), ids=CHANGES)
@on_ranks(2)
def test_what_a_hook_does_to_a_gradient_that_has_moved_is_noticed(world, change):
    model = net()
    attached(world, model)
    model[2].bias.register_post_accumulate_grad_hook(change)
    with pytest.raises(UsageError, match=r"the gradient of 2\.bias was changed, replaced or removed"):
        backward(model, world.rank)


def test_a_gradient_that_is_its_own_home_under_another_name_stays():
    def body(world):
        model = net()
        attached(world, model)
        for step in range(3):
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad.detach()
            nn.Module.zero_grad(model, set_to_none=False)
            backward(model, world.rank, step)
        return gradients(model)

    expected = [sum(parts) / 2 for parts in zip(*(alone(2, rank) for rank in range(2)), strict=True)]
    for mine in run_ranks(2, body):
        for got, want in zip(mine, expected, strict=True):
            torch.testing.assert_close(got, want)


@on_ranks(2)
def test_a_gradient_in_the_place_of_another_one_is_refused(world):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    attached(world, model)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    first, second = model.parameters()
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(UsageError, match=r"was given memory of another gradient that travels: use a \.clone\(\)"):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_part_of_another_gradient_is_refused(world):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    attached(world, model)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    first, second = model.parameters()
    second.grad = first.grad.flatten()[3:19].view(2, 8)
    with pytest.raises(UsageError, match=r"was given memory of another gradient that travels"):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_graph_that_saved_a_gradient_cannot_be_differentiated_after_the_next_step(world):
    model, rate = net(), torch.tensor(0.1, requires_grad=True)
    attached(world, model)
    for step in range(2):
        model.zero_grad()
        backward(model, world.rank, step)
    saved = (rate * model[0].weight.grad).pow(2).sum()
    model.zero_grad()
    backward(model, world.rank, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(saved, rate)


@on_ranks(2)
def test_ranks_in_different_steps_are_told(world):
    model = net()
    replica = attached(world, model)
    replica._step = world.rank
    with pytest.raises(DisagreementError, match="bucket 0 was summed with something else"):
        backward(model, world.rank)


def test_gradients_outlive_their_replica_and_their_world():
    def body(world):
        model = net()
        replica = attached(world, model)
        backward(model, world.rank)
        before = gradients(model)
        replica.detach()
        return model, before

    for model, before in run_ranks(2, body):
        assert all(map(torch.equal, gradients(model), before))
        backward(model, 0)  # accumulates


@on_ranks(2)
def test_a_graph_of_gradients_is_refused(world):
    model = net()
    attached(world, model)
    x, y = data(world.rank)
    with pytest.raises(UsageError, match="create_graph=True"):
        cross_entropy(model(x), y).backward(create_graph=True)


@for_each(
    ("options", "why"),
    [
        ({"wire": torch.bfloat16}, r"those of 0\.weight are torch\.float32 and travel as torch\.bfloat16"),
        ({"algorithm": commrt.Gossip()}, "with Gossip"),
        ({"algorithm": commrt.BackupWorkers(1)}, "with BackupWorkers"),
        ({"algorithm": commrt.local_sgd.LocalSGD(4)}, "with LocalSGD"),
        ({"gradients": "copies"}, 'give "own", or "views"'),
    ],
)
@on_ranks(2)
def test_what_views_cannot_do_is_refused(world, options, why):
    model = net()
    with pytest.raises(UsageError, match=why):
        commrt.attach(model, sgd(model), world=world, **{"gradients": "views"} | options)


@on_ranks(2)
def test_codes_travel_for_views_of_a_wire_that_is_as_wide_as_they_are(world):
    model = net().bfloat16()
    with pytest.raises(UsageError, match=r"are torch\.bfloat16 and travel as torch\.float32"):
        commrt.attach(model, algorithm=commrt.Direct(), world=world, wire=commrt.quantization.Int8(), gradients="views")


def test_no_two_originals_share_an_element():
    def body(world):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
        replica = commrt.attach(model, world=world, gradients="views")
        for number, home in enumerate(homes_of(replica)):
            home.fill_(number + 1)
        (bucket,) = replica.buckets
        counts = layout_of([home.numel() for home in homes_of(replica)]).counts
        return [(bucket.wire == number + 1).sum().item() for number in range(len(counts))] == list(counts)

    assert run_ranks(2, body) == [True, True]
