# SPDX-License-Identifier: Apache-2.0
"""Compiled models and functions that communicate, over any backend: what each rank gets."""

from __future__ import annotations

import os
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commrt

SEVERAL = 0.0003
"""Megabytes of a bucket, so that a model has several."""


def compiled(thing, **options):
    torch._dynamo.reset()  # or what was compiled for another model serves this one
    return torch.compile(thing, backend=os.environ["COMPILER"], **options)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def losses(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(steps):
        loss = (model(torch.randn(4, 8)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def ddp():
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", int(SEVERAL * 2**20)):  # or torch's compiler refuses it
        return losses(compiled(DistributedDataParallel(network(), bucket_cap_mb=SEVERAL)))


def compiled_inside_ddp():
    return losses(DistributedDataParallel(compiled(network())))


def ddp_with_a_hook():
    model = DistributedDataParallel(network())
    state = commrt.DDPState(commrt.Ring())
    model.register_comm_hook(state, commrt.ddp_hook)
    found = losses(compiled(model))
    commrt.init().close()
    return found


def fsdp():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses(compiled(model))


def all_reduce():
    """Dynamo makes a functional collective of it."""

    @compiled
    def double(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    return [double(torch.arange(4.0) + n).tolist() for n in range(2)]


def functions():
    """In one graph; what each gives is different on each rank."""
    group = dist.group.WORLD

    def all_at_once(x):
        results = (
            functional.all_reduce(x * 2, "sum", group),
            functional.all_gather_single(x * 2, 0, group),
            functional.reduce_scatter_single(x * 2, "max", 0, group),
            functional.all_to_all_single(x * 2, None, None, group),
            functional.broadcast(x * 2, 1, group),
        )
        return torch.cat([result + 1 for result in results])

    x = torch.arange(8.0) * (dist.get_rank() + 1)
    found = compiled(all_at_once, fullgraph=True)(x)
    assert torch.equal(found, all_at_once(x))
    return found.tolist()


def a_world():
    world = commrt.init()

    @compiled
    def both(x):
        y = x * 2
        world.all_reduce(y, "sum")
        return y + 1

    found = [both(torch.arange(4.0) + n).tolist() for n in range(2)]
    world.close()
    return found


INTEGRATIONS = [
    ddp,
    compiled_inside_ddp,
    fsdp,
    all_reduce,
    functions,
    ddp_with_a_hook,
    a_world,
]
