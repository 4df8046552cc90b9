# SPDX-License-Identifier: Apache-2.0
"""Loops that write weights themselves: an exchange is only added to the weights that it was made of."""

from functools import partial
from itertools import product

import local_loops
import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import batch, model_of, params, same
from torch import nn

import commrt
from commrt import Gossip
from commrt.buckets.tensors import exchanged_tensors
from commrt.buckets.weight_part import WeightPart
from commrt.errors import UsageError
from commrt.local_sgd import LocalSGD, Mix, Nesterov

GOSSIPING = [Gossip(), Gossip(staleness=1)]
RELYING = [LocalSGD(4, 2), LocalSGD(4, 2, Mix(0.5)), LocalSGD(4, 2, fragments=2), LocalSGD(5, outer=Nesterov(0.7, 0.5))]


class Loop(local_loops.Loop):
    def __init__(self, world, algorithm, bucket_cap_mb=25):
        momentum = partial(torch.optim.SGD, momentum=0.9)
        super().__init__(world, algorithm, make=momentum, lr=0.01, bucket_cap_mb=bucket_cap_mb)

    def used(self):
        """What the next forward pass computes with."""
        self.model.eval()
        with torch.no_grad():
            self.model(batch(0, 0))
        self.model.train()
        return params(self.model)


@torch.no_grad()
def clamp(model):
    for param in model.parameters():
        param.clamp_(-0.01, 0.01)


def replace_data(model):
    for param in model.parameters():
        param.data = torch.ones_like(param)


def write_in_inference_mode(model):
    with torch.inference_mode():
        for param in model.parameters():
            param.fill_(3.0)


def write_one_value(model):
    model[0].bias.data[0] = 3.0


WRITES = [clamp, replace_data, write_in_inference_mode, write_one_value]


@for_each(("write", "algorithm"), product(WRITES, GOSSIPING))
@on_ranks(2)
def test_what_partners_sent_is_not_added_to_weights_that_were_written_since(world, algorithm, write):
    loop = Loop(world, algorithm).run(3)
    write(loop.model)
    written = params(loop.model)
    with pytest.raises(UsageError, match=r"[02]\.\w+ was written while .*: call replica\.drain\(\) before you write"):
        loop.used()
    assert same(params(loop.model), written)


@for_each(("write", "algorithm"), taking_turns([*WRITES, *WRITES[::-1]], RELYING))
@on_ranks(2)
def test_the_next_step_refuses_weights_that_were_written_while_local_sgd_relies_on_them(world, algorithm, write):
    loop = Loop(world, algorithm, bucket_cap_mb=1e-4).run(5)
    write(loop.model)
    written = params(loop.model)
    with pytest.raises(UsageError, match=r"[02]\.\w+ was written.*replica\.(drain|overwrite_with_first)\(\)"):
        loop.run(1)
    assert same(params(loop.model), written)


@torch.no_grad()
def decay(optimizer, *_):
    for param in optimizer.param_groups[0]["params"]:
        param.mul_(0.99)


@for_each("algorithm", [Gossip(staleness=1), LocalSGD(4, delay=2), LocalSGD(4, outer=Nesterov())])
@on_ranks(2)
def test_hooks_of_the_optimizer_may_write_weights_before_its_step_and_after(world, algorithm):
    loop = Loop(world, algorithm)
    loop.optimizer.register_step_pre_hook(decay)
    loop.optimizer.register_step_post_hook(decay)
    loop.run(9).replica.drain()
    assert loop.replica.step == 9


@for_each(("algorithm", "part"), taking_turns(GOSSIPING, ["", "2"]))
@on_ranks(2)
def test_a_model_that_loads_a_state_uses_it_as_it_is(world, algorithm, part):
    loop = Loop(world, algorithm).run(5)
    module = loop.model.get_submodule(part)
    module.load_state_dict({name: torch.full_like(tensor, 0.5) for name, tensor in module.state_dict().items()})
    loop.used()
    assert all((param == 0.5).all() for param in module.parameters())
    loop.run(3).replica.drain()
    assert loop.replica.step == 8


@for_each("algorithm", RELYING)
@on_ranks(2)
def test_a_loaded_model_goes_on_after_its_replica_has_begun_anew(world, algorithm):
    loop = Loop(world, algorithm).run(6)
    loop.model.load_state_dict(model_of(3 + world.rank).state_dict())
    loop.replica.overwrite_with_first()
    assert same(loop.anchors(), params(model_of(3)))
    loop.run(6).replica.consolidate()
    assert loop.replica.replicas_equal()


@for_each(("algorithm", "drains"), [(Gossip(), True), (Gossip(staleness=1), True), (LocalSGD(3), False)])
@on_ranks(2)
def test_weights_may_be_clamped_where_none_are_under_way(world, algorithm, drains):
    loop = Loop(world, algorithm)

    def clamp_all():
        if drains:
            loop.replica.drain()
        clamp(loop.model)
        assert all((weight.abs() <= 0.01).all() for weight in loop.used())

    assert loop.run(7, clamp_all).replica.step == 7


def by_copy(model, average):
    with torch.no_grad():
        own = params(model)
        for param, other in zip(model.parameters(), average.parameters(), strict=True):
            param.copy_(other)
        yield
        for param, other in zip(model.parameters(), own, strict=True):
            param.copy_(other)


def by_data(model, average):
    for _ in range(2):
        for param, other in zip(model.parameters(), average.parameters(), strict=True):
            param.data, other.data = other.data, param.data
        yield


@for_each(
    ("swap", "algorithm", "drained"),
    [(by_copy, RELYING[-1], False), (by_data, RELYING[-1], False), (by_data, Gossip(), True)],
)
@on_ranks(2)
def test_an_average_of_the_weights_may_be_swapped_in_and_out(world, swap, algorithm, drained):
    """After each step, evaluate with an average of the weights so far."""
    loop = Loop(world, algorithm)
    average = torch.optim.swa_utils.AveragedModel(loop.model)

    def evaluate():
        if drained:
            loop.replica.drain()
        average.update_parameters(loop.model)
        expected = params(average.module)
        for place, _ in enumerate(swap(loop.model, average.module)):
            assert place or same(loop.used(), expected)

    loop.run(9, evaluate).replica.consolidate()
    assert loop.replica.replicas_equal()


@on_ranks(2)
def test_what_is_under_way_ends_before_the_first_rank_overwrites_all(world):
    loop = Loop(world, Gossip()).run(3)
    loop.replica.overwrite_with_first()
    loop.used()
    assert loop.replica.replicas_equal()


@for_each("algorithm", GOSSIPING)
@on_ranks(2)
def test_weights_are_an_optimizers_own_within_its_step(world, algorithm):
    """It may call a closure in between, as LBFGS does."""
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=6, tolerance_change=0, tolerance_grad=0)
    replica = commrt.attach(model, optimizer, algorithm, world=world)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0, world.rank)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert replica.step == 6


def fill(param):
    param.data.fill_(7.0)


def reshape(param):
    param.data = torch.zeros(4)


@torch.no_grad()
def write_last(param):
    param[-1] = 1.0


@for_each(
    ("tensor", "write", "in_flight"),
    [
        (torch.randn(5, 7), fill, False),
        (torch.randn(7, 5).t(), fill, False),
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), fill, False),
        (torch.tensor(2.0), fill, False),
        (torch.randn(100, 50), fill, False),
        (torch.full((3,), torch.nan), fill, False),
        (torch.zeros(3), reshape, False),
        (torch.zeros(1_000_003), write_last, True),
    ],
    ids=["rows", "columns", "channels last", "a scalar", "many", "NaN", "another shape", "one of a million in flight"],
)
def test_a_write_is_seen_in_any_layout_behind_autograds_back_or_not(tensor, write, in_flight):
    model = nn.ParameterDict({"nothing": torch.zeros(0), "something": tensor})
    part = WeightPart(0, exchanged_tensors(model))
    part.is_relied_on, part.in_flight = True, in_flight
    part.note()
    assert part.written() is None
    write(model["something"])
    assert part.written() == "something"
