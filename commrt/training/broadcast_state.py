# SPDX-License-Identifier: Apache-2.0
"""Send state from one rank to the others in a collective: parameters, buffers, and what optimizers keep.

Functions take the members of a world; the source is the lowest of them where none is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from commrt.algorithms import halving_doubling
from commrt.buckets.layout import MIB
from commrt.runtime.world import World
from commrt.training.model_state import Stateful, batches, dump, flatten, load, restore, unread_buffers
from commrt.transport.protocol import Tag

__all__ = ["gather_integers", "gather_values", "mean", "overwrite_buffers", "overwrite_model", "overwrite_states"]


def overwrite_model(world: World, model: nn.Module, step: int, source: int | None = None) -> None:
    """Overwrite parameters and buffers with the source's; collective."""
    _overwrite(world, [*model.parameters(), *model.buffers()], unread_buffers(model), step, source)


def overwrite_buffers(world: World, model: nn.Module, step: int) -> None:
    """Overwrite buffers with the source's; collective."""
    _overwrite(world, list(model.buffers()), unread_buffers(model), step)


def _overwrite(
    world: World, tensors: Sequence[Tensor], unread: frozenset[int], step: int, source: int | None = None
) -> None:
    for batch in batches(tensors, 25 * MIB):
        flat = flatten(batch)
        _broadcast(world, flat, step, source)
        if _members(world, source)[0] != world.rank:
            restore(flat, batch, unread)


def _broadcast(world: World, flat: Tensor, step: int, source: int | None) -> None:
    """Overwrite `flat` with the source's, among the members when it is sent; ends in an error if one is lost."""
    tag = Tag(step, "state")
    world.membership.submit(lambda: world.broadcast_now(flat, _members(world, source), tag)).result()


def _members(world: World, source: int | None) -> tuple[int, ...]:
    """Return all members, the source first."""
    return tuple(sorted(world.members, key=lambda rank: (rank != source, rank)))


def overwrite_states(world: World, owners: Sequence[Stateful], step: int, source: int | None = None) -> None:
    """Overwrite the state of `owners` with the source's; collective.

    Ranks need not have as much state as the source. It loads its own state as well, so that it fails where the others
    fail.
    """
    if not owners or len(world.members) == 1:
        return
    is_source = _members(world, source)[0] == world.rank
    flat = dump(owners) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = torch.tensor([flat.numel()], device="cpu")
    _broadcast(world, nbytes, step, source)
    flat = flat if is_source else flat.new_empty(int(nbytes))
    if flat.numel():
        _broadcast(world, flat, step, source)
    load(flat, owners)


def mean(world: World, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return the mean of all members' `tensors`, in fp32 (fp64 for fp64), the same bits on all of them; collective."""
    members = tuple(world.members)
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in wide]) / len(members)
    schedule = halving_doubling.all_reduce(len(members))
    world.membership.submit(lambda: world.run_now(schedule, flat, Tag(step, "mean"), members)).result()
    parts = torch.split(flat, [tensor.numel() for tensor in wide])
    return [part.view(like.shape) for part, like in zip(parts, wide, strict=True)]


def gather_values(world: World, value: float, step: int) -> dict[int, float]:
    """Return the `value` of each rank that was a member when the values were sent; collective."""
    own = torch.zeros((2, world.size), dtype=torch.float64, device="cpu")
    own[0, world.rank], own[1, world.rank] = value, 1
    values, shares = mean(world, [own], step)[0]
    return {rank: float(values[rank] / shares[rank]) for rank in range(world.size) if shares[rank] > 0}


def gather_integers(world: World, number: int) -> dict[int, int]:
    """Return the `number` of each rank that was a member when the numbers were sent; collective."""
    return {rank: round(each) for rank, each in gather_values(world, number, number).items()}
