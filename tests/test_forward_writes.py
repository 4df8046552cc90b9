# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward pass writes parameters, by what is in a rank's batch, are refused at attach()."""

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
WAYS = [commrt.Torus2D(), commrt.Gossip(), commrt.LocalSGD(period=2)]


def train(net, rank):
    """Train on indices of this rank's own."""
    optimizer = sgd(net)
    for step in range(5):
        at = torch.randint(0, ROWS, (6, 3), generator=torch.Generator().manual_seed(10 * step + rank))
        net(at).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def table(kind=nn.Embedding):
    return kind(ROWS, 6, max_norm=1.0)


TABLES = [
    table,
    lambda: table(nn.EmbeddingBag),
    lambda: nn.Sequential(table(), nn.Linear(6, 2)),
    lambda: torch.compile(table(), backend="eager"),
]


@for_each(("make", "algorithm"), taking_turns(TABLES, WAYS))
@on_ranks(2)
def test_an_embedding_with_max_norm_is_refused_and_the_sentence_says_what_to_do(world, make, algorithm):
    net = make()
    with pytest.raises(UsageError, match=r"has max_norm=1\.0: .* after each .*weight\.renorm_\(2\.0, 0, 1\.0\)"):
        commrt.attach(net, sgd(net), algorithm, world=world)


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
