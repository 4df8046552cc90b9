# SPDX-License-Identifier: Apache-2.0
"""What attach() promises to a training loop, on threads as ranks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from threading import Event, Lock
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding
from torch.utils.checkpoint import checkpoint

import commrt
from commrt.algorithms import ring
from commrt.errors import CommrtError, DisagreementError, TransportClosed, TransportError, UsageError
from commrt.kernels.layout import layout_of
from commrt.replicas.engine import KEPT
from commrt.replicas.handover import of_all
from commrt.testing.faults import fail_at, with_faults
from commrt.testing.ranks import local_worlds, run_ranks

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

    elements = layout_of([param.numel() for param in net().parameters()]).numel
    sent = run_ranks(4, body)
    assert sum(sent) == 2 * 3 * elements * 4
    assert max(sent) <= 2 * 3 / 4 * elements * 4 + 4 * 16 * 4  # chunks are even to within a granule


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


def test_a_rank_without_a_batch_takes_part_by_averaging_even_if_gradients_are_clipped():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        for step in range(4):
            optimizer.zero_grad()
            if (world.rank, step) in [(0, 1), (2, 1), (1, 3)]:
                replica.average()
            else:
                backward(model, world.rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return replica.replicas_equal(), replica.step, model[0].weight.grad.abs().sum().item() > 0

    assert run_ranks(3, body) == [(True, 4, True)] * 3


def test_a_rank_without_a_micro_batch_averages_nothing_in_no_sync():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        for step in range(6):
            with nullcontext() if step % 2 else replica.no_sync():
                replica.average() if world.rank == 1 and step in (2, 5) else backward(model, world.rank, step)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 3)] * 2


def test_a_rank_that_steps_without_a_backward_pass_while_others_had_one_is_told_on_every_rank():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        before = model[0].weight.clone()
        with pytest.raises(DisagreementError, match=r"without a backward pass .*: call replica\.average\(\)"):
            optimizer.step() if world.rank == 1 else backward(model, world.rank)
        return torch.equal(model[0].weight, before)

    assert run_ranks(3, body) == [True] * 3


def test_gradients_made_by_hand_are_averaged_when_all_ranks_step():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        for param in model.parameters():
            param.grad = torch.full_like(param, world.rank)
        optimizer.step()
        return replica.replicas_equal(), model[0].weight.grad.unique().tolist()

    assert run_ranks(3, body) == [(True, [1.0])] * 3


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


def test_gradients_travel_in_the_dtype_in_which_they_are_made():
    def body(world):
        model = net().bfloat16()
        model.somebody = nn.Linear(6, 3, dtype=torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32
            param.register_hook(lambda grad: grad.float() * 1.001)  # no longer a bfloat16
        replica = commrt.attach(model, world=world)
        x, y = data(0)
        out = model[2](model[1](model[0](x.bfloat16())))
        if world.rank:
            out = out + model.somebody(x.bfloat16())
        cross_entropy(out, y).backward()
        return replica.buckets[0].wire.dtype, gradients(model)

    (wire, ours), (_, theirs) = run_ranks(2, body)
    assert wire == torch.float32
    assert all(map(torch.equal, ours, theirs))
    for grad in ours:
        assert grad.dtype == torch.float32
        assert not torch.equal(grad.bfloat16().float(), grad)


def test_gradients_of_two_dtypes_travel_apart_even_if_their_parameters_have_one():
    def body(world):
        model = net()
        model[0].weight.grad_dtype = torch.float64
        model[0].weight.register_hook(lambda grad: grad.double())
        replica = commrt.attach(model, world=world)
        backward(model, world.rank)
        return [bucket.wire.dtype for bucket in replica.buckets], model[0].weight.grad

    (dtypes, ours), (_, theirs) = run_ranks(2, body)
    assert sorted(dtypes, key=str) == [torch.float32, torch.float64]
    assert torch.equal(ours, theirs)


def test_a_narrow_wire_is_chosen_by_the_gradients_dtype():
    def body(world):
        model = net()
        for param in model.parameters():
            param.grad_dtype = torch.bfloat16
        replica = commrt.attach(model, world=world, wire=torch.float16)
        return replica.buckets[0].wire.dtype

    assert run_ranks(1, body) == [torch.bfloat16]


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


class Gathering(nn.Module):
    """Multiplies its weight by all that it has been given so far."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, more):
        self.total = self.total + more
        return (self.weight * self.total).sum()


def test_a_graph_that_needs_the_buffers_that_were_overwritten_ends_in_an_error():
    def body(world):
        model = Gathering()
        commrt.attach(model, world=world)
        first, second = model(1.0 + world.rank), model(10.0 * (1 + world.rank))
        first.backward()
        if world.rank == 1:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                second.backward()
        return model.total.tolist()

    assert run_ranks(2, body) == [[11.0] * 3] * 2


def test_a_graph_may_run_again_where_overwriting_changed_nothing():
    def body(world):
        model = Gathering()
        replica = commrt.attach(model, world=world)
        loss = model(2.0)
        loss.backward(retain_graph=True)
        replica.sync_buffers()
        loss.backward()
        return model.weight.grad.tolist()

    assert run_ranks(2, body) == [[4.0] * 3] * 2


def test_statistics_that_a_graph_reads_are_not_overwritten_behind_its_back():
    def body(world):
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

    run_ranks(2, body)


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


def test_a_detach_in_the_middle_of_a_step_leaves_alone_what_is_on_its_way():
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world, bucket_cap_mb=1e-9)
        detached = Event()
        world.lane.submit(lambda: detached.wait(10))
        model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, world.rank)
        replica.detach()
        detached.set()
        world.run(ring.all_reduce(2), torch.ones(2))  # all that was submitted before has run
        return gradients(model[2])

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


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
        with pytest.raises(UsageError, match=r"changed since attach\(\), 0\.weight was frozen and is not any more"):
            backward(model, world.rank)

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
        world.lane.submit(lambda: None).result()  # what left before the error has arrived
        world.agree("all are here")
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


def with_buffer(buffer):
    model = net()
    model.register_buffer("odd", buffer)
    return model


def made_in_inference_mode():
    with torch.inference_mode():
        return net()


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
        (lambda: net().to("meta"), {}, r"has no values: use model\.to_empty\(\)"),
        (complex_weights, {}, r"weight has gradients of dtype torch\.complex64: those of torch\.float64, "),
        (lambda: nn.Embedding(4, 2, sparse=True), {}, "use sparse=False"),
        (net, {"wire": torch.int8}, r"wire=torch\.int8 cannot travel: use torch\.float32"),
        (net, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be a positive number"),
        (net, {"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf must be a positive number"),
        (lambda: net(nn.LazyLinear(8)), {}, r"2\.weight has no shape yet: run one batch"),
        (lambda: with_buffer(torch.ones(1).expand(5)), {}, r"odd is expanded, .* use its \.clone\(\)"),
        (lambda: with_buffer(torch.eye(3).to_sparse()), {}, r"odd has layout torch\.sparse_coo"),
        (lambda: with_buffer(torch.ones(3, device="meta")), {}, r"odd on meta\): move the model to one device"),
        (made_in_inference_mode, {}, r"0\.weight was made under torch\.inference_mode"),
        (net, {"algorithm": commrt.Torus2D(grid=(3, 3))}, "a grid of 3 x 3 does not fit 2 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_averaged_is_refused_with_a_sentence(make, options, says):
    def body(world):
        with pytest.raises(UsageError, match=says):
            commrt.attach(make(), world=world, **options)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda model: {"optimizer": commrt.Ring()}, r"a Ring was given as the optimizer: .* by its name \(algorithm="),
        (lambda model: {"optimizer": model.parameters()}, "a Parameter was given as the optimizer: pass a torch"),
        (lambda model: {"optimizer": halving(sgd(model))}, "a LambdaLR was given as the optimizer"),
        (
            lambda model: {"algorithm": "ring"},
            r"algorithm='ring' makes no schedules: pass an object, such as commrt\.Ring",
        ),
        (lambda model: {"algorithm": commrt.Ring}, r"algorithm=<class .*Ring'> makes no schedules: pass an object"),
        (lambda model: {"bucket_cap_mb": "25"}, "bucket_cap_mb='25' must be a positive number"),
        (lambda model: {"world": 1}, r"world=1 is no world: pass what commrt\.init\(\) returned"),
        (lambda model: {"model": sgd(model)}, r"the model is a SGD: attach\(\) takes a torch\.nn\.Module first"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_with_a_sentence(given, says):
    def body(world):
        model = net()
        with pytest.raises(UsageError, match=says):
            commrt.attach(**{"model": model, "world": world, **given(model)})
        return world.attached

    assert run_ranks(1, body) == [0]


@pytest.mark.parametrize("state", [None, [1], {"step": -1}, {"step": "3"}, torch.ones(2)], ids=repr)
def test_a_state_of_the_wrong_kind_is_refused_with_a_sentence(state):
    def body(world):
        with pytest.raises(UsageError, match=r"without a step number: .*; pass what state_dict\(\) returned"):
            commrt.attach(net(), world=world).load_state_dict(state)

    run_ranks(1, body)


def test_run_refuses_what_is_no_schedule_or_no_tensor_with_a_sentence():
    def body(world):
        with pytest.raises(UsageError, match=r"Ring\(.*\) is no schedule: an algorithm makes one with its schedule"):
            world.run(commrt.Ring(), torch.ones(2))
        with pytest.raises(UsageError, match=r"a buffer must be a tensor, not a list: make one with torch\.tensor"):
            world.run(ring.all_reduce(1), [1, 2])

    run_ranks(1, body)


@pytest.mark.parametrize("again", [lambda model: model, lambda model: model[0], nn.Sequential], ids=range(3))
def test_a_parameter_is_attached_once_alone_or_inside_another_module(again):
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        with pytest.raises(UsageError, match="weight is attached already"):
            commrt.attach(again(model), world=world)

    run_ranks(2, body)


def test_attach_without_a_world_says_so():
    with pytest.raises(UsageError, match=r"call commrt\.init\(\) first"):
        commrt.attach(net())


def test_models_whose_backward_passes_differ_in_order_are_told_apart():
    def body(world):
        models = [net(), net()]
        for model in models:
            commrt.attach(model, sgd(model), world=world)
        with pytest.raises(DisagreementError, match=r"models attached to one world in different orders"):
            backward(models[world.rank], world.rank)

    run_ranks(2, body)


def test_two_models_in_one_order_keep_their_own_means():
    def body(world):
        models = [net(), net(nn.Linear(8, 8))]
        for model in models:
            commrt.attach(model, sgd(model), world=world)
        for step in range(3):
            for model in models:
                backward(model, world.rank, step)
        return [gradients(model) for model in models]

    first, second = run_ranks(2, body)
    for ours, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_an_optimizer_that_steps_what_nobody_averages_is_refused():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        stranger = nn.Linear(8, 3)
        optimizer.add_param_group({"params": stranger.parameters()})
        x, y = data(world.rank)
        hidden = model[1](model[0](x))
        cross_entropy(model[2](hidden) + stranger(hidden), y).backward()
        with pytest.raises(UsageError, match=r"the optimizer steps a parameter of shape \[3, 8\], which"):
            optimizer.step()

    run_ranks(2, body)


def test_one_optimizer_may_step_two_attached_models():
    def body(world):
        models = [net(), net(nn.Linear(8, 8))]
        optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)
        replicas = [commrt.attach(model, optimizer, world=world) for model in models]
        for model in models:
            backward(model, world.rank)
        optimizer.step()
        return [replica.replicas_equal() for replica in replicas]

    assert run_ranks(2, body) == [[True, True]] * 2


def test_two_optimizers_may_step_one_model_even_where_a_rank_has_no_batch():
    def body(world):
        model = net()
        optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 0.01)]
        replica = commrt.attach(model, optimizers, world=world)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model, world.rank, step) if (world.rank, step) != (1, 2) else replica.average()
            for optimizer in optimizers:
                optimizer.step()
        return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 4)] * 2


def test_an_optimizer_of_another_model_is_refused():
    def body(world):
        with pytest.raises(UsageError, match="the SGD steps no parameter of the model"):
            commrt.attach(net(), sgd(net()), world=world)

    run_ranks(1, body)


@pytest.mark.parametrize("what", ["lr", "type", "state"])
def test_optimizers_that_differ_are_named_on_every_rank(what):
    def body(world):
        odd = world.rank == 1
        model = net()
        kind = torch.optim.Adam if what == "type" and odd else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.2 if what == "lr" and odd else 0.1)
        if what == "state" and odd:
            backward(model, 0)
            optimizer.step()
        with pytest.raises(DisagreementError, match="rank 1 disagrees with rank 0 about optimizer: "):
            commrt.attach(model, optimizer, world=world)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_optimizers_that_have_stepped_alone_start_with_the_state_of_rank_0(kind):
    def body(world):
        model = net()
        optimizer = kind(model.parameters(), 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        optimizer.step(lambda: backward(model, world.rank) or torch.ones(()))
        optimizer.zero_grad()
        replica = commrt.attach(model, optimizer, world=world)
        for step in range(3):
            optimizer.step(lambda s=step: backward(model, world.rank, s) or torch.ones(()))
        return replica.replicas_equal()

    assert run_ranks(2, body) == [True, True]


def test_a_default_device_on_which_nothing_can_be_sent_is_no_hindrance():
    def body(world):
        model = net(nn.BatchNorm1d(8))
        optimizer = sgd(model)
        inputs = [data(world.rank, step) for step in range(3)]
        with torch.device("meta"):
            replica = commrt.attach(model, optimizer, world=world)
            with replica.join(torch.amp.GradScaler("cpu")):
                for x, y in inputs[world.rank :]:
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
            world.run(ring.all_reduce(2), inputs[0][0].view(-1))
            return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 3)] * 2


def test_training_goes_on_equally_after_join():
    def body(world):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.join():
            for step in range((7, 3, 5)[world.rank]):
                optimizer.zero_grad()
                backward(model, world.rank, step)
                optimizer.step()
        for step in range(3):
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.step()
        return replica.replicas_equal(), replica.step

    assert run_ranks(3, body) == [(True, 10)] * 3


def backward_often(model, rank):
    """8 bits are equal by chance once in 256 steps."""
    for step in range(4):
        backward(model, rank, step)


def raise_rate(optimizer, world):
    optimizer.param_groups[0]["lr"] *= 1 + world.rank


def raise_rate_in_a_tensor(optimizer, world):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1 + world.rank)


def move_betas(optimizer, world):
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 - 0.01 * world.rank)


def turn(optimizer, world):
    optimizer.param_groups[0]["maximize"] = world.rank == 1


@pytest.mark.parametrize("change", [raise_rate, raise_rate_in_a_tensor, move_betas, turn])
def test_settings_that_come_to_differ_are_noticed_before_the_next_step(change):
    def body(world):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        commrt.attach(model, optimizer, world=world)
        backward(model, world.rank)
        optimizer.step()
        change(optimizer, world)
        with pytest.raises(DisagreementError, match=r"settings .* differ between ranks: drive schedulers by what"):
            backward_often(model, world.rank)

    run_ranks(2, body)


def test_settings_that_are_equal_in_value_are_equal_in_any_form():
    def body(world):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = commrt.attach(model, optimizer, world=world)
        group = optimizer.param_groups[0]
        for step in range(3):
            group["lr"] = (1, np.float32(1), torch.tensor(1.0))[(world.rank + step) % 3]
            group["note"] = f"of rank {world.rank}"
            optimizer.param_groups[0] = group = dict(sorted(group.items(), reverse=world.rank == 1))
            backward(model, world.rank, step)
        return replica.step

    assert run_ranks(3, body) == [3, 3, 3]


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def test_schedulers_and_scalers_given_to_join_go_on_equally_after_it():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        scheduler, scaler = halving(optimizer), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def train(steps):
            for step in range(steps):
                optimizer.zero_grad()
                x, y = data(world.rank, step)
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()

        with replica.join(scheduler, scaler):
            train((2, 5, 3)[world.rank])
        train(2)
        return replica.replicas_equal(), scheduler.last_epoch, scaler.get_scale()

    assert run_ranks(3, body) == [(True, 7, 32.0)] * 3


def test_a_scheduler_that_was_not_given_to_join_is_noticed_after_it():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        scheduler = halving(optimizer)
        with replica.join():
            for step in range((2, 4)[world.rank]):
                backward(model, world.rank, step)
                optimizer.step()
                scheduler.step()
        scheduler.step()
        with pytest.raises(DisagreementError, match=r"pass them to replica\.join\(\) where ranks may run out of data"):
            backward_often(model, world.rank)

    run_ranks(2, body)


def test_join_refuses_what_has_no_state_and_ranks_that_hand_over_different_things():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        with pytest.raises(UsageError, match=r"join\(\) was given a float, which has no state_dict\(\)"):
            replica.join(0.1).__enter__()
        given = [torch.amp.GradScaler("cpu")] if world.rank == 1 else []
        with pytest.raises(DisagreementError, match="rank 1 disagrees with rank 0 about also: 'GradScaler' against"):
            replica.join(*given).__enter__()
        with replica.join():
            backward(model, world.rank)
        return replica.step

    assert run_ranks(2, body) == [1, 1]


class Keeping:
    """Has a state that `given` makes."""

    def __init__(self, given):
        self.given = given

    def state_dict(self):
        return {"kept": self.given()}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize("given", [Lock, object, lambda: print], ids=["lock", "object", "function"])
def test_a_state_that_cannot_be_sent_is_refused_on_all_ranks(given):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        with pytest.raises(UsageError, match="the state of Keeping cannot be sent to other ranks"):  # noqa: SIM117
            with replica.join(Keeping(given)):
                backward(model, world.rank)
        return replica.replicas_equal()

    assert run_ranks(2, body) == [True, True]


def test_settings_of_any_kind_outlive_join():
    def body(world):
        model = net()
        optimizer = torch.optim.AdamW([{"params": model.parameters(), "shape": lambda step: step, "lr": 0.1}])
        replica = commrt.attach(model, optimizer, world=world)
        with replica.join():
            for step in range((4, 2)[world.rank]):
                optimizer.param_groups[0]["lr"] = np.float64(0.1) / (1 + step)
                optimizer.zero_grad()
                backward(model, world.rank, step)
                optimizer.step()
        group = optimizer.param_groups[0]
        return replica.replicas_equal(), group["lr"], type(group["lr"]), group["shape"](7)

    assert run_ranks(2, body) == [(True, 0.025, float, 7)] * 2


def test_join_is_refused_inside_itself_and_where_nobody_may_leave():
    def body(world):
        model, tied_to_four = net(), net()
        replica = commrt.attach(model, sgd(model), world=world)
        with replica.join(), pytest.raises(UsageError, match=r"join\(\) inside join\(\)"), replica.join():
            pass
        replica = commrt.attach(tied_to_four, algorithm=commrt.Torus2D(grid=(2, 2)), world=world)
        with pytest.raises(UsageError, match=r"cannot go on without a rank that has left join\(\): a grid of 2 x 2"):
            replica.join().__enter__()

    run_ranks(4, body)


def test_a_roll_call_that_fails_says_where():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        with pytest.raises(TransportError) as caught, replica.join():
            backward_often(model, world.rank)
        return caught.value.place

    places = run_ranks(2, body, wrap=with_faults(fail_at(rank=1, step=1, bucket="roll call")))
    assert [(at.rank, at.step, at.bucket) for at in places] == [(0, 1, "roll call"), (1, 1, "roll call")]


COLLECTIVES = {
    "run": lambda world, replica: world.run(ring.all_reduce(2), torch.ones(2)),
    "agree": lambda world, replica: world.agree("lunch"),
    "all_equal": lambda world, replica: world.all_equal("lunch", "soup"),
    "attach": lambda world, replica: commrt.attach(net(), world=world),
    "replicas_equal": lambda world, replica: replica.replicas_equal(),
    "sync_buffers": lambda world, replica: replica.sync_buffers(),
    "overwrite_with_first": lambda world, replica: replica.overwrite_with_first(),
    "load_state_dict": lambda world, replica: replica.load_state_dict({"step": 1}),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_would_meet_a_roll_call_is_refused_inside_join(name):
    def body(world):
        model = net(nn.BatchNorm1d(8))
        replica = commrt.attach(model, sgd(model), world=world)
        with replica.join():
            for step in range((3, 1)[world.rank]):
                backward(model, world.rank, step)
                with pytest.raises(UsageError, match=r"inside join\(\): .* so do this before join\(\) or after it"):
                    COLLECTIVES[name](world, replica)
        COLLECTIVES[name](world, replica)
        return replica.step

    assert run_ranks(2, body) == [1 if name == "load_state_dict" else 3] * 2


def test_a_rank_without_a_batch_may_average_inside_join():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.join():
            for step in range((4, 2)[world.rank]):
                optimizer.zero_grad()
                replica.average() if (world.rank, step) == (1, 1) else backward(model, world.rank, step)
                optimizer.step()
        return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 4)] * 2


class OfThreeOrFour:
    def schedule(self, step, ranks):
        if ranks not in (3, 4):
            raise UsageError("this needs 3 or 4 ranks")
        return ring.all_reduce(ranks)


def test_join_is_refused_before_it_begins_if_some_number_of_ranks_could_not_go_on():
    def body(world):
        replica = commrt.attach(net(), algorithm=OfThreeOrFour(), world=world)
        with pytest.raises(UsageError, match=r"cannot go on without a rank that has left join\(\): this needs 3 or 4"):
            replica.join().__enter__()

    run_ranks(4, body)


def test_a_parameter_that_changed_its_shape_is_refused_before_it_overwrites_its_neighbours():
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world)
        model[2].weight.data = torch.randn(5, 8)
        model[2].bias.data = torch.randn(5)
        with pytest.raises(UsageError, match=r"the gradient of 2\.bias is float32\[5\], but was float32\[3\] when"):
            backward(model, world.rank)

    run_ranks(2, body)


def transposed(model):
    model[0].weight.grad = torch.randn(model[0].weight.shape[::-1]).t()


def expanded(model):
    model[0].weight.grad = torch.ones(1).expand(model[0].weight.shape)


def in_one_place(model):
    memory = torch.randn(model[0].weight.numel() + 1)
    model[0].weight.grad = memory[:-1].view(model[0].weight.shape)
    model[0].bias.grad = memory[-1 - model[0].bias.numel() : -1]


def inferred(model):
    with torch.inference_mode():
        model[0].bias.grad = torch.ones(model[0].bias.shape)


def wider(model):
    model[0].bias.grad = None
    model[0].bias.grad_dtype = torch.float64
    model[0].bias.grad = torch.ones(model[0].bias.shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (transposed, r"0\.weight lies in memory with strides \(1, 8\), and autograd makes it with \(6, 1\)"),
        (expanded, r"0\.weight lies in memory with strides \(0, 0\)"),
        (in_one_place, r"0\.(weight|bias) and 0\.(weight|bias) share memory"),
        (inferred, r"0\.bias was made under torch\.inference_mode"),
        (wider, r"0\.bias is float64\[8\], but was float32\[8\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_gradient_that_cannot_be_packed_is_refused_before_anything_is_written(spoil, what):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        with replica.no_sync():
            backward(model, world.rank)
        spoil(model)
        before = gradients(model)
        with pytest.raises(UsageError, match=what):
            replica.average()
        assert all(map(torch.equal, gradients(model), before))

    run_ranks(2, body)


@pytest.mark.parametrize("detached", [False, True], ids=["views", "detached views"])
def test_gradients_of_different_buckets_that_share_memory_are_refused(detached):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world, bucket_cap_mb=1e-5)
        assert len(replica.buckets) > 2
        with replica.no_sync():
            backward(model, world.rank)
        memory = torch.randn(2 * model[0].weight.numel())
        model[0].weight.grad = memory[: model[0].weight.numel()].view(model[0].weight.shape)
        shared = memory[-1 - model[-1].bias.numel() - model[0].weight.numel() :][: model[-1].bias.numel()]
        model[-1].bias.grad = shared.detach() if detached else shared
        with pytest.raises(UsageError, match=r"(weight|bias) and .*\.(weight|bias) share memory"):
            replica.average()

    run_ranks(2, body)


def test_gradients_that_moved_to_where_others_were_are_apart():
    def body(world):
        model = net(nn.Linear(8, 8), nn.Linear(8, 8))
        replica = commrt.attach(model, world=world, bucket_cap_mb=1e-5)
        for _ in range(3):
            with replica.no_sync():
                backward(model, world.rank)
            model[2].weight.grad, model[3].weight.grad = model[3].weight.grad, model[2].weight.grad
            replica.average()

    run_ranks(2, body)


def test_a_model_that_moved_to_another_device_is_refused():
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        with replica.no_sync():
            backward(model, world.rank)
        model.to("meta")
        with pytest.raises(UsageError, match=r"changed since attach\(\), 0\.weight was replaced"):
            replica.average()

    run_ranks(2, body)


def test_strides_of_axes_with_one_element_do_not_matter():
    def body(world):
        model = seeded(lambda: nn.Conv2d(1, 4, 3))
        replica = commrt.attach(model, world=world)
        model.weight.grad = torch.full((4, 9), float(world.rank)).as_strided((4, 1, 3, 3), (9, 1, 3, 1))
        model.bias.grad = torch.ones(4)
        replica.average()
        return model.weight.grad.unique().tolist()

    assert run_ranks(2, body) == [[0.5], [0.5]]


def test_a_buffer_that_changed_its_dtype_is_refused():
    def body(world):
        model = net(nn.BatchNorm1d(8))
        commrt.attach(model, sgd(model), world=world)
        model[2].num_batches_tracked = model[2].num_batches_tracked.int()
        with pytest.raises(UsageError, match=r"have changed since attach\(\), now .*num_batches_tracked torch\.int32"):
            model(data(world.rank)[0]).sum().backward()

    run_ranks(2, body)


def test_a_rank_without_a_batch_takes_part_even_after_a_step_that_was_skipped():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        backward(model, world.rank)  # as a GradScaler does that finds an overflow: no step
        optimizer.zero_grad()
        backward(model, 0) if world.rank == 0 else replica.average()
        optimizer.step()
        return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 2)] * 2


def test_a_closure_that_only_accumulates_is_noticed():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)

        def closure():
            with replica.no_sync():
                backward(model, world.rank)

        with pytest.raises(UsageError, match=r"never averaged: the last backward pass of an accumulation must be"):
            optimizer.step(closure)
        return all(map(torch.equal, model.parameters(), net().parameters()))

    assert run_ranks(2, body) == [True, True]


def test_no_closure_may_be_said_as_none():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        for how in (optimizer.step, lambda: optimizer.step(None), lambda: optimizer.step(closure=None)):
            for param in model.parameters():
                param.grad = torch.full_like(param, world.rank)
            how()
        return replica.replicas_equal(), model[0].weight.grad.unique().tolist()

    assert run_ranks(3, body) == [(True, [1.0])] * 3


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
def test_a_closure_that_fills_gradients_without_a_backward_pass_is_refused_before_the_step(by_name):
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
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
        return replica.replicas_equal()

    assert run_ranks(2, body) == [True, True]


def test_a_closure_may_hold_the_last_pass_of_an_accumulation():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.no_sync():
            backward(model, world.rank, 0)
        optimizer.step(lambda: backward(model, world.rank, 1))
        return replica.replicas_equal(), replica.step

    assert run_ranks(2, body) == [(True, 1)] * 2


def test_a_closure_may_return_what_was_computed_before_or_nothing_at_all():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        backward(model, world.rank)
        assert optimizer.step(lambda: 7) == 7
        optimizer.zero_grad()
        optimizer.step(lambda: None)  # all ranks leave this batch out
        return replica.replicas_equal(), [param.grad for param in model.parameters()]

    assert run_ranks(2, body) == [(True, [None] * 4)] * 2


def test_a_rank_whose_closure_leaves_the_batch_out_alone_is_told_on_every_rank():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        with pytest.raises(DisagreementError, match=r"without a backward pass .*: call replica\.average\(\)"):
            optimizer.step(lambda: None if world.rank == 1 else backward(model, world.rank))

    run_ranks(2, body)


def test_a_closure_that_is_not_called_does_not_hide_gradients_that_were_held_back():
    class Deaf(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad)

    def body(world):
        model = net()
        optimizer = Deaf(model.parameters(), lr=0.1)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.no_sync():
            backward(model, world.rank)
        with pytest.raises(UsageError, match="parameters have changed already: load a checkpoint"):
            optimizer.step(lambda: None)

    run_ranks(2, body)


def test_gradients_that_were_held_back_and_then_dropped_are_forgotten():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        with replica.no_sync():
            backward(model, world.rank)
        optimizer.zero_grad()
        optimizer.step()
        return replica.replicas_equal()

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "to zeros"])
def test_averages_that_were_zeroed_unused_do_not_count_as_this_steps(to_none):
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        for _ in range(2):
            backward(model, world.rank)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        backward(model, world.rank)
        optimizer.zero_grad(set_to_none=to_none)  # all ranks leave this step out
        before = model[0].weight.clone()
        with pytest.raises(DisagreementError, match=r"without a backward pass .*: call replica\.average\(\)"):
            optimizer.step() if world.rank == 1 else backward(model, world.rank)
        return torch.equal(model[0].weight, before)

    assert run_ranks(2, body) == [True, True]


def test_gradients_that_are_zero_everywhere_are_stepped_with():
    def body(world):
        model = net()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, world=world)
        for factor in (1.0, 0.0, 0.0, 1.0):
            optimizer.zero_grad(set_to_none=False)
            (model(data(world.rank)[0]).sum() * factor).backward()
            optimizer.step()
        return replica.replicas_equal()

    assert run_ranks(3, body) == [True] * 3


def test_one_rank_alone_goes_on_after_an_interrupted_backward_pass():
    def body(world):
        model = net()
        replica = commrt.attach(model, sgd(model), world=world)
        handle = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, 0)
        handle.remove()
        model.zero_grad()
        backward(model, 0)
        return gradients(model), replica.step

    found, step = run_ranks(1, body)[0]
    assert step == 1
    assert all(map(torch.equal, found, local_gradients(net(), 0)))


def test_backward_after_the_world_was_closed_says_so():
    def body(world):
        model = net()
        commrt.attach(model, sgd(model), world=world)
        world.close()
        with pytest.raises(TransportClosed, match=r"the world was closed, .* call init\(\)"):
            backward(model, world.rank)

    run_ranks(2, body)


def test_an_attach_that_failed_leaves_a_plain_model():
    def body(world):
        model = net()
        with pytest.raises(TransportError):
            commrt.attach(model, sgd(model), world=world)
        backward(model, world.rank)
        return gradients(model)

    for rank, found in enumerate(run_ranks(2, body, wrap=with_faults(fail_at(bucket="state")))):
        assert all(map(torch.equal, found, local_gradients(net(), rank)))


def test_attach_in_inference_mode_is_refused():
    def body(world):
        with torch.inference_mode(), pytest.raises(UsageError, match="call it outside"):
            commrt.attach(net(), world=world)

    run_ranks(1, body)


@pytest.mark.parametrize("keep", [True, False], ids=["replica kept", "replica dropped"])
def test_a_model_that_is_dropped_is_freed_without_detach(keep):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        backward(model, world.rank)
        return weakref.ref(model), weakref.ref(replica), replica if keep else None

    with local_worlds(1)[0] as world:
        model, replica, kept = body(world)
        gc.collect()
        assert (model() is not None) == keep
        del kept
        gc.collect()
        assert model() is None
        assert replica() is None


def test_hooks_live_as_long_as_any_part_of_the_model():
    def body(world):
        parts = [nn.Linear(6, 8), nn.Linear(8, 3)]
        commrt.attach(nn.ModuleList(parts), world=world)
        gc.collect()
        x, y = data(world.rank)
        cross_entropy(parts[1](parts[0](x)), y).backward()
        return [param.grad for part in parts for param in part.parameters()]

    assert all(map(torch.equal, *run_ranks(2, body)))


def test_copies_and_pickles_of_an_attached_model_are_plain():
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301  # its own
        for other in copies:
            backward(other, world.rank)
        return [gradients(other) for other in copies]

    for rank, found in enumerate(run_ranks(2, body)):
        for own in found:
            assert all(map(torch.equal, own, local_gradients(net(), rank)))


class Backwards(nn.Module):
    """Layers that are registered in another order than they are used in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8)
        self.first = nn.Linear(6, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_buckets_follow_the_order_of_use_after_the_first_step():
    def body(world):
        model = seeded(Backwards)
        replica = commrt.attach(model, sgd(model), world=world, bucket_cap_mb=1e-4)
        layouts = []
        for step in range(3):
            layouts.append([{name.split(".")[0] for name in bucket.names} for bucket in replica.buckets])
            backward(model, world.rank, step)
        return layouts, gradients(model)

    (layouts, ours), (theirs, others) = run_ranks(2, body)
    assert layouts == theirs
    assert layouts[0] == [{"first"}, {"middle"}, {"last"}]
    assert layouts[1] == layouts[2] == [{"last"}, {"middle"}, {"first"}]
    assert all(map(torch.equal, ours, others))


class Restless:
    """An algorithm that makes a new schedule each time."""

    def schedule(self, step, ranks):
        return ring.all_reduce(ranks).named(f"ring of step {step}")


def test_programs_of_schedules_that_never_come_back_are_forgotten():
    def body(world):
        model = net()
        replica = commrt.attach(model, algorithm=Restless(), world=world)
        for step in range(2 * KEPT):
            backward(model, world.rank, step)
        return replica._engine._bound.cache_info().currsize

    assert run_ranks(2, body) == [KEPT, KEPT]


def test_a_schedule_of_fewer_ranks_says_who_is_left_out():
    def body(world):
        with pytest.raises(UsageError, match=r"of 2 ranks and the world has 3: .* schedule\.over"):
            world.run(ring.all_reduce(2), torch.ones(4))
        buffer = torch.ones(4)
        if world.rank != 1:
            world.run(ring.all_reduce(2).over([0, 2], world=3), buffer)
        return buffer[0].item()

    assert run_ranks(3, body) == [2.0, 1.0, 2.0]


def test_optimizers_that_step_in_the_middle_of_a_backward_pass_are_refused():
    def body(world):
        model = net()
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        commrt.attach(model, list(optimizers.values()), world=world)
        for param, optimizer in optimizers.items():
            param.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
        with pytest.raises(UsageError, match=r"while gradients are being averaged: step after backward"):
            backward(model, world.rank)

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_equal_replicas_disagree_by_nothing(ranks):
    def body(world):
        return commrt.attach(net(), world=world).disagreement()

    assert run_ranks(ranks, body) == [0.0] * ranks


def zero(param):
    param.grad = None


def replace(param):
    param.grad = param.grad.clone()


def double(param):
    param.grad.mul_(2)


@pytest.mark.parametrize(
    ("change", "cap_mb"),
    [(zero, 1e-9), (replace, 1e-9), (double, 1e-9), (zero, 25.0)],
    ids=["removed", "replaced", "written to", "removed before its bucket left"],
)
def test_a_gradient_that_somebody_changes_while_it_is_averaged_is_noticed(change, cap_mb):
    def body(world):
        model = net()
        commrt.attach(model, world=world, bucket_cap_mb=cap_mb)
        model[2].weight.register_post_accumulate_grad_hook(change)
        with pytest.raises(
            CommrtError, match=r"the gradient of 2\.weight was changed, replaced or removed while"
        ) as caught:
            backward(model, world.rank)
        return caught.type

    assert UsageError in run_ranks(2, body)  # from the first; the other may have lost its peer, and repeats the reason


def test_alone_a_backward_pass_may_be_stepped_in_the_middle_as_without_us():
    def body(world):
        model = net()
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        commrt.attach(model, list(optimizers.values()), world=world)
        for param, optimizer in optimizers.items():
            param.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
            param.register_post_accumulate_grad_hook(zero)
        backward(model, 0)
        return [param.detach().clone() for param in model.parameters()]

    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(plain, 0)
    optimizer.step()
    assert all(map(torch.equal, run_ranks(1, body)[0], plain.parameters()))


def test_a_step_after_an_interrupted_backward_pass_is_refused():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world, bucket_cap_mb=1e-9)
        model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, world.rank)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match="if an error interrupted it, the other ranks wait for the rest"):
            optimizer.step()

    run_ranks(2, body)


def test_ranks_that_run_different_numbers_of_backward_passes_for_a_step_are_told():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        backward(model, world.rank)
        optimizer.step()
        if world.rank == 0:
            backward(model, 0)
            with pytest.raises(DisagreementError, match="different numbers of backward passes"):
                backward(model, 0, 1)
        else:
            backward(model, 1)
            optimizer.step()
            with pytest.raises(DisagreementError, match="different numbers of backward passes"):
                backward(model, 1, 1)

    run_ranks(2, body)


def swap_layer(model):
    model[0] = nn.Linear(6, 8)


def reparametrize(model):
    nn.utils.parametrizations.weight_norm(model[0])


def grow(model):
    model.append(nn.Linear(3, 3))


@pytest.mark.parametrize("change", [swap_layer, reparametrize, grow])
def test_a_model_that_changed_since_attach_is_refused(change):
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        change(model)
        with pytest.raises(UsageError, match=r"the model has changed since attach\(\), .*: detach\(\) and attach\(\)"):
            backward(model, world.rank)

    run_ranks(2, body)


def add_criterion(model):
    model.criterion = nn.CrossEntropyLoss()


def swap_activation(model):
    model[1] = nn.ReLU()


def drop_activation(model):
    del model[1]


@pytest.mark.parametrize("change", [add_criterion, swap_activation, drop_activation])
def test_modules_without_parameters_may_come_and_go(change):
    def body(world):
        model = net()
        replica = commrt.attach(model, world=world)
        change(model)
        for _ in range(2):
            model[0](data(world.rank)[0]).sum().backward()
        grow(model)
        with pytest.raises(UsageError, match=r"changed since attach\(\), \d\.weight was added"):
            model[0](data(world.rank)[0]).sum().backward()
        return replica.step

    assert run_ranks(2, body) == [2, 2]


def test_a_model_whose_parameters_were_all_assigned_anew_is_refused_at_the_step():
    def body(world):
        model = net()
        optimizer = sgd(model)
        commrt.attach(model, optimizer, world=world)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        backward(model, world.rank)
        with pytest.raises(UsageError, match=r"changed since attach\(\), 0\.weight was replaced or removed"):
            optimizer.step()

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [1, 2])
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


def test_batch_norm_under_checkpointing_ends_as_in_a_plain_process():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    def body(world):
        model = seeded(Net)
        if world is not None:
            commrt.attach(model, world=world)
        for step in range(3):
            backward(model, 0, step)
        return [buffer.clone() for buffer in model.buffers()]

    alone = body(None)
    assert alone[-1] == 6  # a step counts twice: in the forward pass, and when it is run again
    assert all(all(map(torch.equal, alone, ours)) for ours in run_ranks(2, body))


def test_only_one_model_of_a_world_can_be_joined_and_the_others_wait():
    def body(world):
        first, second = net(), net()
        replicas = [commrt.attach(model, world=world) for model in (first, second)]
        with replicas[0].join():
            with pytest.raises(UsageError, match=r"one model of a world can be joined"), replicas[1].join():
                pass
            with pytest.raises(UsageError, match=r"another model of this world is in join\(\)"):
                backward(second, world.rank)
        with replicas[1].join():
            backward(second, world.rank)

    run_ranks(2, body)


def test_many_models_of_a_world_are_told_apart():
    def body(world):
        models = [net() for _ in range(18)]
        for model in models:
            commrt.attach(model, world=world)
        with pytest.raises(DisagreementError, match="in different orders"):
            backward(models[1 if world.rank else 17], world.rank)

    run_ranks(2, body)


def test_detaching_frees_the_buckets_without_the_garbage_collector():
    def body(world):
        gc.collect()
        gc.disable()
        try:
            model = net()
            replica = commrt.attach(model, world=world)
            backward(model, 0)
            wires = [weakref.ref(bucket.wire) for bucket in replica.buckets]
            replica.detach()
            return [wire() is None for wire in wires]
        finally:
            gc.enable()

    assert run_ranks(1, body) == [[True]]


def test_gradients_on_their_way_are_not_kept_after_the_step():
    def body(world):
        model = net()
        commrt.attach(model, world=world)
        backward(model, world.rank)
        kept = weakref.ref(model[0].weight.grad)
        model.zero_grad()
        return kept() is None

    assert run_ranks(2, body) == [True, True]


def test_what_each_gives_is_told_of_those_that_were_members_when_it_was_asked():
    """A rank may come back before the answer is read."""
    before, now = (0, 1, 2), [(0, 1, 2)]

    def run_now(schedule, flat, moment, members):
        assert members == before
        for rank, number in ((1, 5.0), (2, 7.0)):
            flat[rank] += number / 3
            flat[4 + rank] += 1 / 3
        now[0] = (0, 1, 2, 3)

    elastic = SimpleNamespace(submit=lambda task: SimpleNamespace(result=task))
    world = SimpleNamespace(size=4, rank=0, run_now=run_now, elastic=elastic)

    class Lane:
        members = property(lambda _: now[0])

    lane = Lane()
    lane.world = world
    assert of_all(lane, 12) == {0: 12, 1: 5, 2: 7}
