# SPDX-License-Identifier: Apache-2.0
"""Send state from one rank to the others in a collective: parameters, buffers, and what optimizers keep."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn

from commrt.algorithms import halving_doubling
from commrt.buckets.engine import Span
from commrt.buckets.layout import MIB
from commrt.runtime.world import World
from commrt.threads.future import Future
from commrt.training.model_state import Stateful, batches, dump, flatten, load, restore, unread_buffers
from commrt.transport.protocol import Tag

__all__ = [
    "Broadcaster",
    "WorldBroadcaster",
    "gather_integers",
    "gather_values",
    "mean",
    "overwrite_buffers",
    "overwrite_model",
    "overwrite_states",
]


class Broadcaster(Protocol):
    """Sends state from the first of its members to the others."""

    @property
    def world(self) -> World:
        """The world whose communication thread sends."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part; the first is the source."""
        ...

    def submit_broadcast(self, flat: Tensor, step: int) -> Future[Span]:
        """Overwrite `flat` with the first member's; collective."""
        ...


class WorldBroadcaster:
    """Broadcast among all members of the current generation; ends in an error if one of them is lost meanwhile."""

    def __init__(self, world: World, source: int | None = None) -> None:
        """Send from the rank `source`; None for the lowest member."""
        self.world, self._source = world, source

    @property
    def members(self) -> tuple[int, ...]:
        """All members, the source first."""
        return tuple(sorted(self.world.members, key=lambda rank: (rank != self._source, rank)))

    def submit_broadcast(self, flat: Tensor, step: int) -> Future[Span]:
        """Overwrite `flat` with the source's; collective."""
        return self.world.membership.submit(lambda: self._broadcast(flat, step))

    def _broadcast(self, flat: Tensor, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = self.world.broadcast_now(flat, self.members, Tag(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)


def overwrite_model(broadcaster: Broadcaster, model: nn.Module, step: int) -> None:
    """Overwrite parameters and buffers with the first member's; collective."""
    _overwrite(broadcaster, [*model.parameters(), *model.buffers()], unread_buffers(model), step)


def overwrite_buffers(broadcaster: Broadcaster, model: nn.Module, step: int) -> None:
    """Overwrite buffers with the first member's; collective."""
    _overwrite(broadcaster, list(model.buffers()), unread_buffers(model), step)


def _overwrite(broadcaster: Broadcaster, tensors: Sequence[Tensor], unread: frozenset[int], step: int) -> None:
    for batch in batches(tensors, 25 * MIB):
        flat = flatten(batch)
        broadcaster.submit_broadcast(flat, step).result()
        if broadcaster.members[0] != broadcaster.world.rank:
            restore(flat, batch, unread)


def overwrite_states(broadcaster: Broadcaster, owners: Sequence[Stateful], step: int) -> None:
    """Overwrite the state of `owners` with the first member's; collective.

    Ranks need not have as much state as the first member. It loads its own state as well, so that it fails where the
    others fail.
    """
    if not owners or len(broadcaster.members) == 1:
        return
    is_source = broadcaster.members[0] == broadcaster.world.rank
    flat = dump(owners) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = torch.tensor([flat.numel()], device="cpu")
    broadcaster.submit_broadcast(nbytes, step).result()
    flat = flat if is_source else flat.new_empty(int(nbytes))
    if flat.numel():
        broadcaster.submit_broadcast(flat, step).result()
    load(flat, owners)


def mean(broadcaster: Broadcaster, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return the mean of all members' `tensors`, in fp32 (fp64 for fp64), the same bits on all of them; collective."""
    world, members = broadcaster.world, broadcaster.members
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in wide]) / len(members)
    schedule = halving_doubling.all_reduce(len(members))
    world.membership.submit(lambda: world.run_now(schedule, flat, Tag(step, "mean"), members)).result()
    parts = torch.split(flat, [tensor.numel() for tensor in wide])
    return [part.view(like.shape) for part, like in zip(parts, wide, strict=True)]


def gather_values(broadcaster: Broadcaster, value: float, step: int) -> dict[int, float]:
    """Return the `value` of each rank that was a member when the values were sent; collective."""
    own = torch.zeros((2, broadcaster.world.size), dtype=torch.float64, device="cpu")
    own[0, broadcaster.world.rank], own[1, broadcaster.world.rank] = value, 1
    values, shares = mean(broadcaster, [own], step)[0]
    return {rank: float(values[rank] / shares[rank]) for rank in range(broadcaster.world.size) if shares[rank] > 0}


def gather_integers(broadcaster: Broadcaster, number: int) -> dict[int, int]:
    """Return the `number` of each rank that was a member when the numbers were sent; collective."""
    return {rank: round(each) for rank, each in gather_values(broadcaster, number, number).items()}
