# SPDX-License-Identifier: Apache-2.0
"""DTensors on a 2 x 2 mesh, in all placements, and functional collectives, compiled; of whole numbers, so exact."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

EVERY = [*product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2)]
"""Placements on the two dimensions of the mesh."""
WHOLE = [placements for placements in EVERY if Partial() not in placements]
"""Those that a tensor can be changed to."""
EIGHTH = [pair for number, pair in enumerate(product(EVERY, EVERY)) if (number + 3 * (number // len(EVERY))) % 8 == 0]
"""Pairs of placements: each of them twice on either side. All pairs pass too, and take eight times as long."""


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


def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def products():
    """The pairs of placements whose product is not that of the plain tensors."""
    mesh, a, b = square(), numbers(6, 5), numbers(5, 7, seed=1)
    ways = [(placed(a, mesh, left), placed(b, mesh, right)) for left, right in EIGHTH]
    return [str((x.placements, y.placements)) for x, y in ways if not torch.equal((x @ y).full_tensor(), a @ b)]


def changes():
    """The pairs of placements between which a tensor is not changed as it should."""
    mesh, a = square(), numbers(6, 5)
    ways = product(enumerate(EVERY), enumerate(WHOLE))
    chosen = [(before, after) for (one, before), (other, after) in ways if (one + other) % 3 == 0]
    return [str(way) for way in chosen if not is_changed(a, mesh, *way)]


def is_changed(a, mesh, before, after):
    changed = placed(a, mesh, before).redistribute(mesh, after)
    expected = distribute_tensor(a, mesh, after)
    return changed.placements == after and torch.equal(changed.to_local(), expected.to_local())


FUNCTIONS = {
    "all_reduce": lambda x, group: functional.all_reduce(x * 2, "sum", group) + 1,
    "all_gather": lambda x, group: functional.all_gather_single(x * 2, 0, group) + 1,
    "reduce_scatter": lambda x, group: functional.reduce_scatter_single(x * 2, "avg", 0, group) + 1,
    "all_to_all": lambda x, group: functional.all_to_all_single(x * 2, None, None, group) + 1,
    "broadcast": lambda x, group: functional.broadcast(x * 2, 1, group) + 1,
}
PLAIN = {
    "all_reduce": lambda all_x, rank: sum(all_x),
    "all_gather": lambda all_x, rank: torch.cat(all_x),
    "reduce_scatter": lambda all_x, rank: sum(all_x).chunk(len(all_x))[rank] / len(all_x),
    "all_to_all": lambda all_x, rank: torch.cat([x.chunk(len(all_x))[rank] for x in all_x]),
    "broadcast": lambda all_x, rank: all_x[1],
}
"""What a rank gets of all ranks' tensors, before 1 is added."""


def functions():
    """The functions that give something else than they should, called plainly or compiled."""
    rank, group = dist.get_rank(), dist.group.WORLD
    all_x = [numbers(8, 3, seed=each) for each in range(dist.get_world_size())]

    def all_at_once(x, group):
        return [function(x, group) for function in FUNCTIONS.values()]

    expected = [PLAIN[name]([2 * x for x in all_x], rank) + 1 for name in FUNCTIONS]
    whole = torch.compile(all_at_once, fullgraph=True, backend="aot_eager")
    wrong = []
    for how, called in (("eager", all_at_once), ("compiled", whole)):
        results = zip(FUNCTIONS, called(all_x[rank], group), expected, strict=True)
        wrong += [f"{name}, {how}" for name, got, right in results if not torch.equal(got, right)]
    return wrong


def after_functional():
    """What an all-reduce, and a send around the ring, make of results for which nobody has waited."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reduced, sent = (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) for _ in range(2))
    dist.all_reduce(reduced)
    received = torch.zeros(3)
    work = dist.isend(sent, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    return type(reduced).__name__, reduced.tolist(), received.tolist()


def dtensor_refused():
    """What an all-reduce says of a DTensor, which has no memory of its own."""
    try:
        dist.all_reduce(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (4,)), [Replicate()]))
    except ValueError as error:
        return str(error)
    return "no error"


def counted_by_autograd():
    """How many in-place changes autograd counts for an all-reduce of a whole tensor, and of one with gaps."""
    whole, gaps = torch.ones(4), torch.ones(4, 2)[:, 0]
    before = whole._version + gaps._version
    dist.all_reduce(whole)
    dist.all_reduce(gaps)
    return whole._version + gaps._version - before, (whole + gaps).tolist()
