# SPDX-License-Identifier: Apache-2.0
"""What attach() promises to a training loop, on threads as ranks."""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding
from torch.utils.checkpoint import checkpoint

import commrt
from commrt.errors import DisagreementError, TransportClosed, TransportError, UsageError
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.ranks import run_ranks

ONE_SEED_AT_A_TIME = Lock()
"""Threads share torch's generator."""


def seeded(make):
    with ONE_SEED_AT_A_TIME:
        torch.manual_seed(0)
        return make()


def net(*extra):
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def backward(model, rank, step=0):
    x, y = data(rank, step)
    cross_entropy(model(x), y).backward()


def gradients(model):
    return [param.grad.clone() for param in model.parameters()]


def local_gradients(model, rank):
    alone = net(*list(model)[2:-1])
    alone.load_state_dict(model.state_dict())
    backward(alone, rank)
    return gradients(alone)


@pytest.mark.parametrize("cap_mb", [25.0, 1e-4, 1e-9], ids=["one bucket", "three buckets", "a bucket per tensor"])
def test_gradients_are_the_mean_over_ranks(cap_mb):
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world, bucket_cap_mb=cap_mb)
        backward(model, world.rank)
        return gradients(model)

    ours = run_ranks(3, body)
    expected = [sum(parts) / 3 for parts in zip(*(local_gradients(net(), rank) for rank in range(3)), strict=True)]
    for mine in ours:
        for got, want in zip(mine, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_one_rank_changes_nothing_even_with_a_narrow_wire():
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world, wire=torch.bfloat16)
        backward(model, 0)
        return gradients(model)

    assert all(map(torch.equal, run_ranks(1, body)[0], local_gradients(net(), 0)))


def test_the_busiest_rank_sends_what_the_proof_says():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return replica.last.nbytes_sent

    elements = sum(param.numel() for param in net().parameters()) + 4  # a flag per tensor
    sent = run_ranks(4, body)
    assert sum(sent) == 2 * 3 * elements * 4
    assert max(sent) <= 2 * 3 / 4 * elements * 4 + 4 * 8 * 4  # chunks are even to within a granule


def test_step_refuses_gradients_that_no_sync_held_back():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.no_sync():
            backward(model, world.rank)
        with pytest.raises(UsageError, match="never averaged: the last backward pass"):
            optimizer.step()
        backward(model, world.rank)
        optimizer.step()
        return replica.replicas_equal()

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("steps", [(9, 4, 6, 9), (0, 3, 3, 1), (5, 5, 5, 5), (1, 2, 3, 4), (4, 0, 0, 0)], ids=str)
def test_join_averages_over_those_who_still_have_data(steps):
    def body(world):
        model = net(nn.BatchNorm1d(8))
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        members = []
        with replica.join():
            for step in range(steps[world.rank]):
                optimizer.zero_grad()
                backward(model, world.rank, step)
                optimizer.step()
                members.append(replica.last.members)
        return replica.replicas_equal(), replica.step, members

    for rank, (equal, step, members) in enumerate(run_ranks(4, body)):
        assert equal
        assert step == max(steps)
        assert members == [tuple(r for r in range(4) if steps[r] > s) for s in range(steps[rank])]


def test_a_step_under_join_divides_by_those_who_took_part():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        with replica.join():
            if world.rank != 1:
                backward(model, world.rank)
                return_value = gradients(model)
            else:
                return_value = None
        return return_value

    expected = [(a + b) / 2 for a, b in zip(local_gradients(net(), 0), local_gradients(net(), 2), strict=True)]
    ours = run_ranks(3, body)
    for rank in (0, 2):
        for got, want in zip(ours[rank], expected, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("what", ["layers", "algorithm", "wire", "buckets", "broadcast_buffers"])
def test_a_rank_that_attaches_something_else_is_named_on_every_rank(what):
    def body(world):
        odd = world.rank == 2
        model = net(*[nn.Linear(8, 8)] * (what == "layers" and odd))
        options = {"wire": torch.float16 if what == "wire" and odd else None}
        options["bucket_cap_mb"] = 1e-4 if what == "buckets" and odd else 25
        options["broadcast_buffers"] = not (what == "broadcast_buffers" and odd)
        algorithm = commrt.Ring() if what == "algorithm" and odd else commrt.Torus2D()
        field = "buckets" if what in ("layers", "wire") else what
        with pytest.raises(DisagreementError, match=f"rank 2 disagrees with rank 0 about {field}: "):
            commrt.attach(model, sgd(model), algorithm, world=world, **options)

    run_ranks(3, body)


def test_a_parameter_nobody_uses_keeps_no_gradient_and_one_somebody_uses_gets_one():
    def body(world):
        model = net()
        model.nobody, model.somebody = nn.Linear(8, 8), nn.Linear(6, 3)
        commrt.attach(model, sgd(model), world=world)
        x, y = data(world.rank)
        out = model[2](model[1](model[0](x)))
        if world.rank == 1:
            out = out + model.somebody(x)
        cross_entropy(out, y).backward()
        return model.nobody.weight.grad, model.somebody.weight.grad

    results = run_ranks(3, body)
    assert [nobody for nobody, _ in results] == [None] * 3
    assert all(torch.equal(somebody, results[1][1]) for _, somebody in results)
    assert results[0][1].abs().sum() > 0


def test_a_rank_without_any_gradient_takes_part_when_it_steps():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        if world.rank == 0:
            backward(model, 0)
        optimizer.step()
        return replica.replicas_equal(), model[0].weight.grad.abs().sum().item() > 0

    assert run_ranks(3, body) == [(True, True)] * 3


def test_gradients_that_are_views_stay_views():
    def body(world):
        model = net()
        flat = torch.zeros(sum(param.numel() for param in model.parameters()))
        offset = 0
        for param in model.parameters():
            param.grad = flat[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
        commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return flat

    flats = run_ranks(2, body)
    pairs = zip(local_gradients(net(), 0), local_gradients(net(), 1), strict=True)
    expected = torch.cat([((a + b) / 2).flatten() for a, b in pairs])
    for flat in flats:
        torch.testing.assert_close(flat, expected)


def test_any_memory_format_is_averaged_by_position():
    def body(world):
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

    run_ranks(2, body)


def test_parameters_of_several_dtypes_travel_in_their_own_buckets():
    def body(world):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()])
        replica = commrt.attach(model, sgd(model), world=world)
        x = torch.full((1, 4), float(world.rank + 1))
        sum(part(x.to(part.weight.dtype)).double().sum() for part in model).backward()
        assert len(replica.last.spans) == 3
        return [part.weight.grad[0, 0].item() for part in model]

    assert run_ranks(2, body) == [[1.5, 1.5, 1.5]] * 2


def test_buffers_are_rank_zeros_after_each_step_and_a_second_backward_still_works():
    def body(world):
        model = net(nn.BatchNorm1d(8))
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        x, y = data(world.rank)
        loss = cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return replica.replicas_equal(), model[2].running_mean.clone(), model[2].num_batches_tracked.item()

    results = run_ranks(3, body)
    alone = net(nn.BatchNorm1d(8))
    alone(data(0)[0])
    for equal, mean, batches in results:
        assert equal
        assert batches == 1
        torch.testing.assert_close(mean, alone[2].running_mean)


def test_buffers_can_be_left_alone_and_made_equal_on_request():
    def body(world):
        model = net(nn.BatchNorm1d(8))
        replica = commrt.attach(model, sgd(model), world=world, broadcast_buffers=False)
        backward(model, world.rank)
        before = replica.replicas_equal()
        replica.sync_buffers()
        return before, replica.replicas_equal()

    assert run_ranks(2, body) == [(False, True)] * 2


def test_detach_gives_back_a_plain_model_that_can_be_attached_again():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        replica.detach()
        replica.close()
        backward(model, world.rank)
        plain = gradients(model)
        model.zero_grad()
        commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return plain, gradients(model)

    results = run_ranks(2, body)
    for rank, (plain, averaged) in enumerate(results):
        assert all(map(torch.equal, plain, local_gradients(net(), rank)))
        assert all(map(torch.equal, averaged, results[0][1]))


def test_the_step_survives_a_checkpoint_and_must_be_the_same_everywhere():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        state = replica.state_dict()
        replica.load_state_dict({"step": 41})
        with pytest.raises(DisagreementError, match="about step"):
            replica.load_state_dict({"step": world.rank})
        with pytest.raises(UsageError, match="without a step number"):
            replica.load_state_dict({})
        return state, replica.step

    assert run_ranks(2, body) == [({"step": 1, "algorithm": repr(commrt.Torus2D())}, 41)] * 2


def test_a_layer_unfrozen_after_attach_is_refused():
    def body(world):
        model = net()
        model[0].requires_grad_(requires_grad=False)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        model[0].requires_grad_(requires_grad=True)
        backward(model, world.rank)
        with pytest.raises(UsageError, match=r"0\.weight was frozen when the model was attached"):
            optimizer.step()

    run_ranks(2, body)


def test_activation_checkpointing_works_without_reentrance_and_is_refused_with_it():
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world)
        x, y = data(world.rank)
        cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=False)), y).backward()
        averaged = gradients(model)
        with pytest.raises(UsageError, match="use_reentrant=False"):
            cross_entropy(model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)), y).backward()
        return averaged

    results = run_ranks(2, body)
    assert all(map(torch.equal, *results))


def test_a_scaler_skips_the_step_on_all_ranks_or_none():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
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
        return replica.replicas_equal(), scaler.get_scale()

    assert run_ranks(2, body) == [(True, 2.0)] * 2


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_failing_transfer_ends_every_rank_with_its_place_and_nothing_runs_after(bucket):
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world, bucket_cap_mb=1e-4)
        for step in range(2):
            backward(model, world.rank, step)
            optimizer.step()
        with pytest.raises(TransportError) as caught:
            backward(model, world.rank, 2)
        with pytest.raises(TransportClosed, match="an earlier transfer failed"):
            backward(model, world.rank, 3)
        return caught.value

    errors = run_ranks(3, body, wrap=with_faults(fail_at(rank=1, step=2, bucket=bucket)))
    assert [(e.place.rank, e.place.step, e.place.bucket) for e in errors] == [(r, 2, bucket) for r in range(3)]
    assert all("an injected failure" in str(error) for error in errors)


def test_an_interrupted_backward_pass_is_not_continued_silently():
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world, bucket_cap_mb=1e-9)

        def interrupt(_):
            raise KeyError("of the user's own")

        handle = model[0].weight.register_hook(interrupt)
        with pytest.raises(KeyError):
            backward(model, world.rank)
        handle.remove()
        with pytest.raises(UsageError, match="inside or after one that did not end"):
            backward(model, world.rank)

    run_ranks(2, body)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 3))

    def forward(self, index):
        return embedding(index, self.table, sparse=True)


def test_a_sparse_gradient_is_refused_by_name():
    def body(world):
        model = Lookup()
        commrt.attach(model, world=world)
        with pytest.raises(UsageError, match=r"the gradient of table is torch\.sparse_coo"):
            model(torch.tensor([1, 2])).sum().backward()

    run_ranks(2, body)


def half_on_meta():
    model = net()
    model[0].to("meta")
    return model


def frozen():
    return net().requires_grad_(requires_grad=False)


def complex_weights():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (frozen, {}, "no parameter that requires a gradient"),
        (nn.Module, {}, "no parameter that requires a gradient"),
        (half_on_meta, {}, "on different devices .* move the model to one device"),
        (lambda: net().to("meta"), {}, "this version moves CPU tensors only"),
        (complex_weights, {}, "only real floating-point gradients"),
        (lambda: nn.Embedding(4, 2, sparse=True), {}, "use sparse=False"),
        (net, {"wire": torch.int8}, r"wire=torch\.int8 cannot travel: use torch\.float32"),
        (net, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be positive"),
        (net, {"algorithm": commrt.Torus2D(grid=(3, 3))}, "a grid of 3 x 3 does not fit 2 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_averaged_is_refused_with_a_sentence(make, options, says):
    def body(world):
        with pytest.raises(UsageError, match=says):
            commrt.attach(make(), world=world, **options)

    run_ranks(2, body)


def test_a_model_is_attached_once():
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        with pytest.raises(UsageError, match="attached already"):
            commrt.attach(model, world=world)

    run_ranks(2, body)


def test_attach_without_a_world_says_so():
    with pytest.raises(UsageError, match=r"call commrt\.init\(\) first"):
        commrt.attach(net())
