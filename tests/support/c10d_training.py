# SPDX-License-Identifier: Apache-2.0
"""A model trained by one process on whole batches, and by all ranks on their parts; DTensors on a 2 x 2 mesh."""

from functools import cache, partial
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from failing_ranks import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commrt

STEPS, BATCH, LENGTH, WORDS, WIDTH = 3, 16, 8, 31, 22
EVERY = [*product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2)]
"""Placements on the two dimensions of the mesh."""
WHOLE = [placements for placements in EVERY if Partial() not in placements]
"""Those that a tensor can be changed to."""


def network():
    """Predicts a word from the one before it; the ranks cannot share its widths evenly."""
    torch.manual_seed(0)
    hidden = nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *hidden, nn.Linear(WIDTH, WORDS))


def trained(wrap, part=0, parts=1):
    """The parameters, by name, after `STEPS` steps on each batch's part of that number."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randint(0, WORDS, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)):
        words = batch.chunk(parts)[part]
        optimizer.zero_grad()
        cross_entropy(model(words[:, :-1].flatten()), words[:, 1:].flatten()).backward()
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
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def ddp():
    return distance(partial(DistributedDataParallel, bucket_cap_mb=0.005))


def fsdp2():
    return distance(lambda model: sharded(model, init_device_mesh("cpu", (4,))))


def hsdp():
    return distance(lambda model: sharded(model, square()))


# FSDP2 on another backend, with commrt between the replicas ---------------------------------------------------------


def hooked():
    mesh = square()
    with commrt.init(timeout_s=60) as world:
        schedule = commrt.HalvingDoubling().schedule(step=0, ranks=2).over(mesh.mesh.T, world=world.size)

        def average(gradients):
            world.run(schedule, gradients)
            gradients /= 2

        def wrap(model):
            model = sharded(model, mesh["shard"])
            for module in (model, model[0], model[1], model[3]):
                module.set_all_reduce_hook(average)
            return model

        return distance(wrap)


# DTensors, of whole numbers, so exact -------------------------------------------------------------------------------


def numbers(*shape, seed=0):
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).double()


def placed(tensor, mesh, placements):
    """`tensor` in `placements`; the parts of a Partial are a quarter and three quarters."""
    split = distribute_tensor(tensor, mesh, [Replicate() if one.is_partial() else one for one in placements])
    local = split.to_local().clone()
    for dim, one in enumerate(placements):
        if one.is_partial():
            local *= 0.75 if mesh.get_local_rank(dim) else 0.25
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def changes():
    """The pairs of placements between which a tensor is not changed as it should, and none."""
    mesh, a = square(), numbers(6, 5)
    ways = product(enumerate(EVERY), enumerate(WHOLE))
    pairs = [(before, after) for (one, before), (other, after) in ways if (one + 2 * other) % 6 == 0]
    return [str(way) for way in pairs if not is_changed(a, mesh, *way)], []


def is_changed(a, mesh, before, after):
    changed = placed(a, mesh, before).redistribute(mesh, after)
    expected = distribute_tensor(a, mesh, after)
    return changed.placements == after and torch.equal(changed.to_local(), expected.to_local())


def after_functional():
    """What an all-reduce, and a send around the ring, make of results for which nobody has waited."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, sent = (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) for _ in range(2))
    dist.all_reduce(reduced)
    received = torch.zeros(3)
    work = dist.isend(sent, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    found = type(reduced).__name__, reduced.tolist(), received.tolist()
    return found, ("AsyncCollectiveTensor", [16.0] * 3, [4.0] * 3)


def dtensor_refused():
    replicated = distribute_tensor(torch.ones(4), square(), [Replicate(), Replicate()])
    said = raised(lambda: dist.all_reduce(replicated))  # from 2.14 on torch refuses it
    return "a DTensor cannot travel: pass the tensor in it" in said or "does not have a sharding strategy" in said, True


def counted_by_autograd():
    """How many in-place changes autograd counts for an all-reduce of a whole tensor, and of one with gaps."""
    whole, gaps = torch.ones(4), torch.ones(4, 2)[:, 0]
    before = whole._version + gaps._version
    dist.all_reduce(whole)
    dist.all_reduce(gaps)
    return (whole._version + gaps._version - before, (whole + gaps).tolist()), (0, [8.0] * 4)


TRAINED = [ddp, fsdp2, hsdp]
TENSORS = [changes, after_functional, dtensor_refused, counted_by_autograd]
