# SPDX-License-Identifier: Apache-2.0
"""How far each rank is in its loop, on the store: so that ranks that ran out of data outlast the others."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import NamedTuple

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.runtime.world import World
from commrt.store.client import STORE_ANSWER_S, call_store, parse, require
from commrt.threads.clock import now_s

__all__ = ["JoinProgress"]

LOOK_S = 0.005
"""Between two reads of the store."""
RUNNING, ENDED = "running", "ended"


class _Place(NamedTuple):
    steps: int
    has_data: bool


class JoinProgress:
    """Steps of all members of `world`, each of which trains until its data ends; needs a store prefix of its own."""

    def __init__(self, store: Store, world: World) -> None:
        self._store, self._world, self._has_data = store, world, True

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps; costs one store operation."""
        if self._has_data:
            self._set(steps)

    def outlast(self, steps: int) -> Iterator[int]:
        """Record that this rank has ended after `steps` steps, then yield each further step as another rank begins it.

        Returns when all have ended and no rank has done more. Raises `DeadlineExceeded` with the ranks that began no
        step within the timeout, `PeerLost` if one is gone.
        """
        self._has_data = False
        self._set(steps)
        latest_s, before = now_s(), self._all()
        while True:
            ranks = self._all()
            running = [rank for rank, place in ranks.items() if place.has_data]
            if max(place.steps for place in ranks.values()) > steps:
                yield steps
                steps += 1
            elif not running:
                return
            if ranks != before:
                latest_s, before = now_s(), ranks
            self._wait(running, latest_s)

    def last(self) -> int:
        """Return the lowest rank of those that did most steps; call it once all have ended."""
        ranks = self._all()
        return max(ranks, key=lambda rank: (ranks[rank].steps, -rank))

    def _wait(self, running: list[int], latest_s: float) -> None:
        world = self._world
        if running and world.membership.any_gone(running):
            raise PeerLost("a rank that had not ended is gone: look at its output", Place(world.rank))
        if now_s() - latest_s > world.timeout_s:
            what = (
                f"ranks {running} began no step within {world.timeout_s:g} s, and have not ended: look at their output"
            )
            raise DeadlineExceeded(what, Place(world.rank, next(iter(running), None)))
        Event().wait(LOOK_S)

    def _set(self, steps: int) -> None:
        key, value = str(self._world.rank), f"{steps} {RUNNING if self._has_data else ENDED}"
        call_store(lambda: self._store.set(key, value), self._world.timeout_s + STORE_ANSWER_S, self._world.rank)

    def _all(self) -> dict[int, _Place]:
        members, limit_s = self._world.members, self._world.timeout_s + STORE_ANSWER_S
        data = call_store(lambda: {rank: self._store.get(str(rank)) for rank in members}, limit_s, self._world.rank)
        return {rank: parse(f"the progress of rank {rank}", text, _place) for rank, text in data.items()}


def _place(text: bytes) -> _Place:
    steps, state = text.decode().split()
    require(int(steps) >= 0 and state in (RUNNING, ENDED))
    return _Place(int(steps), state == RUNNING)
