# SPDX-License-Identifier: Apache-2.0
"""A batch's way to the next rank of a ring, and what becomes of it where a rank is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms import halving_doubling
from commrt.runtime.elastic import LOST
from commrt.runtime.world import World
from commrt.threads.answer import Answer
from commrt.transport.protocol import Exchange, Group, Moment, Parcel
from commrt.wire.row import Row

__all__ = ["Journey", "Neighbours", "Past"]

KEPT = 8
"""Journeys that can be undone: by so many a rank may be ahead of one that lost its neighbour."""
MOMENT = Moment(0, "samples")


class _Arrival(NamedTuple):
    """What came of a journey."""

    came: bool
    completed: int | None = None
    """The journeys that all who are left have completed; later ones are undone. None where nobody was lost."""


NOTHING = _Arrival(came=False)


class Neighbours:
    """To whom batches go, and from whom they come; on the lane."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._generation = world.elastic.generation.number

    def carry(self, exchange: Exchange, completed: int) -> _Arrival:
        """Run `exchange`, unless ranks that lost one have not come together again."""
        elastic = self.world.elastic
        step = elastic.next_step  # a batch leaves before the weights of its step do
        elastic.next_step += 1
        if not elastic.takes_part(step) or len(self.world.members) == 1:
            return NOTHING
        try:
            if elastic.generation.number != self._generation:
                return self._after_a_loss(completed)
            exchange(MOMENT)
            if elastic.is_elastic:
                self.world.transport.wait()
        except LOST as failure:
            elastic.recover(failure)
            return NOTHING
        return _Arrival(came=True)

    def _after_a_loss(self, completed: int) -> _Arrival:
        """No batch leaves this time: who was ahead takes back what others did not get."""
        size, members = self.world.size, tuple(self.world.members)
        counts = torch.zeros(size, dtype=torch.int64, device="cpu")
        counts[self.world.rank] = completed
        self.world.run_now(halving_doubling.all_reduce(len(members)), counts, MOMENT, members)
        self._generation = self.world.elastic.generation.number
        return _Arrival(came=False, completed=min(counts[list(members)].tolist()))

    def bind(self, leaving: Tensor, coming: Tensor) -> Exchange:
        """To send one and receive the other."""
        members = self.world.members
        place = members.index(self.world.rank)
        after, before = members[(place + 1) % len(members)], members[place - 1]
        return self.world.transport.bind(Group([Parcel(after, leaving)], [Parcel(before, coming)]))


class Past:
    """The latest journeys of a shard's batches, so that they can be undone."""

    def __init__(self, fields: Sequence[Tensor]) -> None:
        self.completed = 0
        """Journeys, ever."""
        self._fields = fields
        self._sent: deque[tuple[Tensor, list[Tensor]]] = deque(maxlen=KEPT)

    def add(self, places: Tensor, landed: Sequence[Tensor]) -> None:
        """What has come takes the place of what has left."""
        self._sent.append((places, [field[places] for field in self._fields]))
        self._put(places, landed)
        self.completed += 1

    def undo(self, completed: int) -> None:
        """Be again where this rank was after so many journeys."""
        while self.completed > completed and self._sent:
            self._put(*self._sent.pop())
            self.completed -= 1
        self.completed = completed

    def forget(self) -> None:
        """The shard was replaced."""
        self._sent.clear()

    def _put(self, places: Tensor, batch: Sequence[Tensor]) -> None:
        for field, part in zip(self._fields, batch, strict=True):
            field[places] = part


class Journey:
    """Room for one batch that leaves and one that comes."""

    def __init__(self, neighbours: Neighbours, batch: Sequence[Tensor]) -> None:
        world = neighbours.world
        self._neighbours, self.room = neighbours, world.elastic.room
        """See `Elastic.room`."""
        self._leaving, self._coming = (Row(batch, world.transport.allocate) for _ in range(2))
        self._landed = [torch.empty_like(part) for part in batch]
        self._answer: Answer[_Arrival] | None = None
        self._exchange: Exchange | None = None
        self.places = torch.empty(0, dtype=torch.int64, device="cpu")
        """Of the batch that leaves, in the shard."""

    def begin(self, batch: Sequence[Tensor], places: Tensor, completed: int) -> None:
        """To the next rank, from the one before."""
        self._leaving.fill(batch)
        self.places = places
        self._answer = self._neighbours.world.lane.submit(lambda: self._neighbours.carry(self._run, completed))

    def _run(self, moment: Moment) -> None:
        if self._exchange is None:
            self._exchange = self._neighbours.bind(self._leaving.flat, self._coming.flat)
        self._exchange(moment)

    def end(self, past: Past) -> None:
        """Wait for it, and take in what has come."""
        arrival = NOTHING if self._answer is None else self._answer.result()
        if arrival.came:
            self._coming.empty(self._landed)
            past.add(self.places, self._landed)
        elif arrival.completed is not None:
            past.undo(arrival.completed)
