# SPDX-License-Identifier: Apache-2.0
"""How far each rank is in its loop, on the store, as ranks run out of data at different times.

It writes only this rank's key on the store. Used on the thread that trains, inside `Replica.join`
of replicas that exchange after the optimizers' steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.runtime.world import World
from commrt.store.client import TimedStore
from commrt.store.parsing import parse, require
from commrt.threads.deadline import clock

READ_EVERY_S = 0.005
"""Seconds between two reads of the store."""


class JoinProgress:
    """How many steps each member has begun, and whether it has data; on a store prefix of its own.

    What a lost rank had begun counts, too: all that are left go as far as it may have gone. Made by
    all members of `world` together, with the same empty `store`.
    """

    def __init__(self, store: Store, world: World) -> None:
        self._world = world
        self._has_data = True
        self._ranks = tuple(world.members)  # all that record their steps, lost ones too
        self._store = TimedStore(store, world.rank, lambda: world.timeout_s)

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps; costs one store operation."""
        if self._has_data:
            self._set(steps)

    def outlast(self, steps: int) -> Iterator[int]:
        """Record that this rank ended after `steps` steps; yield each step another rank begins.

        Returns when all have ended and no rank has done more. Raises `DeadlineExceeded` with the
        ranks that began no step within the timeout, `PeerLost` if one is gone.
        """
        world = self._world
        self._has_data = False  # from now on `begin` records nothing
        self._set(steps)
        latest_s = clock.now_s()
        before = self._all()
        while True:
            ranks = self._all()
            running = [rank for rank in world.members if ranks[rank][1]]
            if max(begun for begun, _ in ranks.values()) > steps:
                yield steps
                steps += 1
            elif not running:
                return
            if ranks != before:
                latest_s = clock.now_s()
                before = ranks
            if running and world.membership.any_gone(running):
                raise PeerLost(
                    "a rank that had not ended is gone: look at its output", Place(world.rank)
                )
            if clock.now_s() - latest_s > world.timeout_s:
                raise DeadlineExceeded(
                    f"ranks {running} began no step within {world.timeout_s:g} s, and have not"
                    " ended: look at their output",
                    Place(world.rank, next(iter(running), None)),
                )
            Event().wait(READ_EVERY_S)

    def last(self) -> int:
        """Return the lowest rank of those that did most steps; call it once all have ended."""
        ranks = self._all()
        return max(self._world.members, key=lambda rank: (ranks[rank][0], -rank))

    def _set(self, steps: int) -> None:
        self._store.set(str(self._world.rank), f"{steps} {self._has_data:d}")

    def _all(self) -> dict[int, tuple[int, bool]]:
        data = {rank: self._store.get(str(rank)) for rank in self._ranks}
        return {
            rank: parse(f"the progress of rank {rank}", text, _place) for rank, text in data.items()
        }


def _place(text: bytes) -> tuple[int, bool]:
    steps, has_data = map(int, text.split())
    require(steps >= 0 and has_data in (0, 1))
    return steps, has_data == 1
