# SPDX-License-Identifier: Apache-2.0
"""A model or gradient that changed after attach() is refused before anything is overwritten."""

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, gradients, net, train, trainee, zero
from torch import nn

import commrt
from commrt.errors import CommrtError, UsageError
from commrt.kernels import torch_packing
from commrt.local_sgd import LocalSGD
from commrt.testing.ranks import run_ranks


def transposed(model):
    model[0].weight.grad = torch.randn(model[0].weight.shape[::-1]).t()


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


def longer(model):
    model[2].bias.data = torch.randn(5)
    model[2].bias.grad = torch.randn(5)


@for_each(
    ("spoil", "what"),
    [
        (transposed, r"0\.weight lies in memory with strides \(1, 8\), and autograd makes it with \(6, 1\)"),
        (in_one_place, r"0\.(weight|bias) and 0\.(weight|bias) share memory"),
        (inferred, r"0\.bias was made under torch\.inference_mode"),
        (wider, r"0\.bias is float64\[8\], but was float32\[8\]"),
        (longer, r"2\.bias is float32\[5\], but was float32\[3\]"),
    ],
)
@on_ranks(2)
def test_a_gradient_that_cannot_be_packed_is_refused_before_anything_is_written(world, spoil, what):
    model = net()
    replica = commrt.attach(model, world=world)
    with replica.no_sync():
        backward(model, world.rank)
    spoil(model)
    before = gradients(model)
    with pytest.raises(UsageError, match=what):
        replica.average()
    assert all(map(torch.equal, gradients(model), before))


@for_each(("ranks", "kind"), product((1, 2), ("own", "views")))
def test_a_sparse_gradient_is_refused(ranks, kind):
    def body(world):
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
        replica = commrt.attach(model, world=world, gradients=kind)
        model[0].sparse = True
        for context in (replica.no_sync(), nullcontext()):
            with context, pytest.raises(UsageError, match=r"0\.weight is torch\.sparse_coo: only dense"):
                model(torch.tensor([1, 2])).sum().backward()
            model.zero_grad()

    run_ranks(ranks, body)


@on_ranks(2)
def test_gradients_of_different_buckets_that_share_memory_are_refused(world):
    model = net()
    commrt.attach(model, world=world, bucket_cap_mb=1e-9)
    in_one_place(model)
    with pytest.raises(UsageError, match="share memory"):
        backward(model, world.rank)


def replace(param):
    param.grad = param.grad.clone()


def double(param):
    param.grad.mul_(2)


def point_elsewhere(param):
    param.grad.data = param.grad.data.clone()


@for_each(
    ("change", "kind", "cap_mb"),
    [
        *product([zero, replace, double], ["own"], [1e-9]),
        (zero, "own", 25),
        *product([replace, double], ["views"], [1e-9]),
        *product([zero, replace, double, point_elsewhere], ["large views"], [25]),
    ],
)
def test_a_gradient_that_somebody_changes_while_it_is_averaged_is_noticed(change, kind, cap_mb, monkeypatch):
    if kind == "large views":  # each moves to the wire as soon as it is there
        monkeypatch.setattr(torch_packing, "SMALL_NUMEL", 0)
    kind = kind.split()[-1]

    def body(world):
        model = net()
        commrt.attach(model, world=world, bucket_cap_mb=cap_mb, gradients=kind)
        model[2].weight.register_post_accumulate_grad_hook(change)
        with pytest.raises(
            CommrtError, match=r"gradient of 2\.weight was changed, replaced or removed while"
        ) as caught:
            backward(model, world.rank)
        return caught.type

    assert UsageError in run_ranks(2, body)  # from the first; the other may have lost its peer, and repeats the reason


def swap_layer(model):
    model[0] = nn.Linear(6, 8)


def grow(model):
    model.append(nn.Linear(3, 3))


@for_each(
    ("change", "what"),
    [
        (swap_layer, r"0\.weight was replaced or removed"),
        (grow, r"3\.weight was added"),
        (lambda model: model[1].requires_grad_(True), r"1\.weight was frozen and is not any more"),
    ],
)
@on_ranks(2)
def test_a_model_that_changed_since_attach_is_refused(world, change, what):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 3))
    replica = commrt.attach(model, world=world)
    change(model)
    with pytest.raises(UsageError, match=rf"the model has changed since attach\(\), {what}: detach\(\) and attach\(\)"):
        replica.average()


def drop(layer):
    layer.bias = None


def renew(layer):
    layer.bias = nn.Parameter(layer.bias.detach().clone())


def spread(layer):
    layer.bias.data = layer.bias.data.repeat_interleave(2)[::2]


EXCHANGED_LATER = [commrt.Gossip(), commrt.Gossip(staleness=1), LocalSGD(2, 1)]


@for_each(("change", "algorithm"), product([drop, renew, spread], EXCHANGED_LATER))
@on_ranks(2)
def test_a_parameter_that_is_replaced_while_weights_are_on_their_way_is_refused_in_these_words_too(
    world, change, algorithm
):
    model, optimizer, _ = trainee(world, algorithm=algorithm)
    train(model, optimizer, world.rank, steps=3)
    change(model[2])
    with pytest.raises(UsageError, match=r"since attach\(\), 2\.bias was (replaced or removed|float.*): detach"):
        train(model, optimizer, world.rank, steps=1)


@on_ranks(2)
def test_a_model_whose_parameters_were_all_assigned_anew_is_refused_at_the_step(world):
    model, optimizer, _ = trainee(world)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    backward(model, world.rank)
    with pytest.raises(UsageError, match=r"changed since attach\(\), 0\.weight was replaced or removed"):
        optimizer.step()


@on_ranks(2)
def test_modules_without_parameters_may_come_and_go(world):
    model = net()
    replica = commrt.attach(model, world=world)
    model[1] = nn.ReLU()
    model.criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        model[0](data(world.rank)[0]).sum().backward()
    assert replica.step == 2
    grow(model)
    with pytest.raises(UsageError, match=r"changed since attach\(\), \d\.weight was added"):
        model[0](data(world.rank)[0]).sum().backward()
