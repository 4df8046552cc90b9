# SPDX-License-Identifier: Apache-2.0
"""A transformer, trained by one process on whole batches, and by all ranks on their parts of them."""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import commrt

STEPS, BATCH, LENGTH, WORDS, WIDTH, HEADS, LAYERS = 8, 16, 8, 32, 32, 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.heads(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(gelu(self.wide(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        """How badly each word is predicted by those before it, on average."""
        x = self.words(words[:, :-1]) + self.places(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.out(self.norm(x)).flatten(0, 1), words[:, 1:].flatten())


def batches():
    """[STEPS] of [BATCH, LENGTH + 1] words."""
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (STEPS, BATCH, LENGTH + 1), generator=source)


def trained(wrap, part=0, parts=1):
    """The parameters, by name, after `STEPS` steps on each batch's part of that number."""
    model = wrap(Transformer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        model(batch.chunk(parts)[part]).backward()
        optimizer.step()
    return {name.removeprefix("module."): whole(param) for name, param in model.named_parameters()}


def whole(param):
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


@cache
def alone():
    return trained(lambda model: model)


def distance(wrap):
    """The largest distance of a parameter to that of one process, in parts of its length."""
    ours = trained(wrap, dist.get_rank(), dist.get_world_size())
    assert ours.keys() == alone().keys()
    return max(float((ours[name] - one).norm() / one.norm()) for name, one in alone().items())


def sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp():
    return distance(partial(DistributedDataParallel, bucket_cap_mb=0.02))


def fsdp2():
    return distance(lambda model: sharded(model, init_device_mesh("cpu", (4,))))


def hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return distance(lambda model: sharded(model, mesh))


# FSDP2 on another backend, with commrt between the replicas ---------------------------------------------------------


def hooked(replicas, shards):
    """As `distance`, on a mesh of that shape."""
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    with commrt.init(timeout_s=60) as world:
        schedule = commrt.HalvingDoubling().schedule(step=0, ranks=replicas).over(mesh.mesh.T, world=world.size)

        def average(gradients):
            world.run(schedule, gradients)
            gradients /= replicas

        def wrap(model):
            model = sharded(model, mesh["shard"])
            for module in (model, *model.layers):
                module.set_all_reduce_hook(average)
            return model

        return distance(wrap)


def two_replicas():
    return hooked(2, 2)


def four_replicas():
    return hooked(4, 1)
