# SPDX-License-Identifier: Apache-2.0
"""State goes from the first member of a step to the others: a model's tensors, and what optimizers and others keep."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor, nn

from commrt.algorithms import halving_doubling
from commrt.model.state import Stateful, batches, dump, flatten, load, restore, unread_buffers
from commrt.replicas.report import Span
from commrt.runtime.world import World
from commrt.threads.answer import Pending
from commrt.transport.protocol import Moment
from commrt.wire.buckets import MIB

__all__ = [
    "Broadcasting",
    "Gathering",
    "mean",
    "of_all",
    "of_each",
    "overwrite_buffers",
    "overwrite_model",
    "overwrite_states",
]


class Broadcasting(Protocol):
    """Who sends state, from the first of its members to the others."""

    @property
    def world(self) -> World:
        """All ranks."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Those that take part."""
        ...

    def submit_broadcast(self, flat: Tensor, step: int) -> Pending[Span]:
        """Overwrite `flat` with the first member's."""
        ...


class Gathering:
    """All ranks that are left, as a `Broadcasting`."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def members(self) -> tuple[int, ...]:
        """See `Broadcasting`."""
        return tuple(self.world.members)

    def submit_broadcast(self, flat: Tensor, step: int) -> Pending[Span]:
        """See `Broadcasting`."""
        return self.world.elastic.submit(lambda: self._broadcast(flat, step))

    def _broadcast(self, flat: Tensor, step: int) -> Span:
        begin_s = perf_counter()
        nbytes_sent = self.world.broadcast_now(flat, self.members, Moment(step, "state"))
        return Span("state", begin_s, perf_counter(), nbytes_sent)


def overwrite_model(lane: Broadcasting, model: nn.Module, step: int) -> None:
    """Parameters and buffers; collective."""
    _overwrite(lane, [*model.parameters(), *model.buffers()], unread_buffers(model), step)


def overwrite_buffers(lane: Broadcasting, model: nn.Module, step: int) -> None:
    """Buffers alone; collective."""
    _overwrite(lane, list(model.buffers()), unread_buffers(model), step)


def _overwrite(lane: Broadcasting, tensors: Sequence[Tensor], unread: frozenset[int], step: int) -> None:
    for batch in batches(tensors, 25 * MIB):
        flat = flatten(batch)
        lane.submit_broadcast(flat, step).result()
        if lane.members[0] != lane.world.rank:
            restore(flat, batch, unread)


def overwrite_states(lane: Broadcasting, owners: Sequence[Stateful], step: int) -> None:
    """The state of `owners`, which the others may not have yet; collective.

    The first member loads its own as well: it then fails where the others fail.
    """
    if not owners or len(lane.members) == 1:
        return
    first = lane.members[0] == lane.world.rank
    flat = dump(owners) if first else torch.empty(0, dtype=torch.uint8, device="cpu")
    nbytes = torch.tensor([flat.numel()], device="cpu")
    lane.submit_broadcast(nbytes, step).result()
    flat = flat if first else flat.new_empty(int(nbytes))
    if flat.numel():
        lane.submit_broadcast(flat, step).result()
    load(flat, owners)


def mean(lane: Broadcasting, tensors: Sequence[Tensor], step: int) -> list[Tensor]:
    """The mean of all members' `tensors`, in fp32 (fp64 for fp64), everywhere the same bits; collective."""
    world, members = lane.world, lane.members
    wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in wide]) / len(members)
    schedule = halving_doubling.all_reduce(len(members))
    world.elastic.submit(lambda: world.run_now(schedule, flat, Moment(step, "mean"), members)).result()
    return [
        part.view(like.shape) for part, like in zip(torch.split(flat, [t.numel() for t in wide]), wide, strict=True)
    ]


def of_each(lane: Broadcasting, value: float, step: int) -> dict[int, float]:
    """What each member gives, of those that were when it ran: others may be by now; collective."""
    own = torch.zeros((2, lane.world.size), dtype=torch.float64, device="cpu")
    own[0, lane.world.rank], own[1, lane.world.rank] = value, 1
    values, shares = mean(lane, [own], step)[0]
    return {rank: float(values[rank] / shares[rank]) for rank in range(lane.world.size) if shares[rank] > 0}


def of_all(lane: Broadcasting, number: int) -> dict[int, int]:
    """Likewise, of whole numbers."""
    return {rank: round(each) for rank, each in of_each(lane, number, number).items()}
