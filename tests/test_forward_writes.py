# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward pass writes parameters, by what is in a rank's batch, are refused at attach()."""

from __future__ import annotations

import re

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from small_models import seeded, sgd
from torch import nn
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import commrt
from commrt.errors import UsageError

ROWS = 11
WAYS = [commrt.Torus2D(), commrt.Gossip(), commrt.local_sgd.LocalSGD(period=2)]


def train(net, rank, after_step=lambda: None):
    """Train on indices of this rank's own."""
    optimizer = sgd(net)
    for step in range(5):
        at = torch.randint(0, ROWS, (6, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        net(at).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


class Subclass(nn.Embedding):
    pass


class Same(nn.Module):
    def forward(self, x):
        return x


def table(kind=nn.Embedding):
    return kind(ROWS, 6, max_norm=1.0)


def parametrized():
    return nn.utils.parametrize.register_parametrization(table(), "weight", Same())


TABLES = [
    table,
    lambda: table(nn.EmbeddingBag),
    lambda: table(Subclass),
    lambda: nn.Sequential(table(), nn.Linear(6, 2)),
    lambda: nn.Sequential(table().requires_grad_(requires_grad=False), nn.Linear(6, 2)),
    parametrized,
    lambda: torch.compile(table(), backend="eager"),
]


@for_each(("make", "algorithm"), taking_turns(TABLES, WAYS))
@on_ranks(2)
def test_an_embedding_with_max_norm_is_refused_and_the_sentence_says_what_to_do(world, make, algorithm):
    net = make()
    with pytest.raises(UsageError, match=r"has max_norm=1\.0: .* after each optimizer\.step\(\): .*weight\.renorm_"):
        commrt.attach(net, sgd(net), algorithm, world=world)


@on_ranks(2)
def test_what_the_sentence_says_keeps_replicas_equal_and_all_rows_short(world):
    with pytest.raises(UsageError) as refusal:
        commrt.attach(nn.Embedding(ROWS, 6, max_norm=0.5, norm_type=3.0), world=world)
    advice = re.search(r"with torch\.no_grad\(\): (weight\.renorm_\(.*\))$", str(refusal.value))
    plain = seeded(lambda: nn.Embedding(ROWS, 6))
    replica = commrt.attach(plain, world=world)

    def rescale():
        with torch.no_grad():
            eval(advice[1], {"weight": plain.weight})  # noqa: S307  # the words of our own error

    rescale()
    train(plain, world.rank, rescale)
    assert replica.replicas_equal()
    assert plain.weight.norm(3.0, dim=1).max().item() <= 0.5 + 1e-6


@on_ranks(1)
def test_one_rank_alone_may_train_an_embedding_with_max_norm(world):
    alone = table()
    commrt.attach(alone, world=world)
    train(alone, world.rank)


@for_each("algorithm", WAYS[:2])
@on_ranks(2)
def test_a_max_norm_that_is_set_after_attach_is_noticed_in_the_first_step(world, algorithm):
    net = seeded(lambda: nn.Sequential(nn.Embedding(ROWS, 6), nn.Linear(6, 2)))
    optimizer = sgd(net)
    commrt.attach(net, optimizer, algorithm, world=world)
    net[0].max_norm = 1.0
    with pytest.raises(UsageError, match=r"changed since attach\(\), max_norm of 0 was set: detach\(\)"):  # noqa: PT012
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def quantized(*, learning):
    fake = _LearnableFakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    if learning:
        fake.enable_param_learning()
    return seeded(lambda: nn.Sequential(nn.Embedding(ROWS, 6), fake, nn.Linear(6, 2)))


@on_ranks(2)
def test_a_fake_quantizer_that_writes_its_scale_from_a_batch_is_refused_and_one_that_learns_it_is_not(world):
    with pytest.raises(UsageError, match=r"1 writes its parameters scale and zero_point .*enable_param_learning"):
        commrt.attach(quantized(learning=False), world=world)
    net = quantized(learning=True)
    replica = commrt.attach(net, world=world)
    train(net, world.rank)
    assert replica.replicas_equal()
