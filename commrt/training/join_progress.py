# SPDX-License-Identifier: Apache-2.0
"""How far each rank is in its loop, on the store: so that ranks that ran out of data outlast the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event

from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.store.client import STORE_ANSWER_S, call_store, parse, require
from commrt.threads.clock import now_s

__all__ = ["JoinProgress"]

LOOK_S = 0.005
"""Between two reads of the store."""
RUNNING = "running"


class JoinProgress:
    """Steps of all `members`, each of which trains until its data ends. Collective; needs a store prefix of its own."""

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Callable[[], Sequence[int]],
        timeout_s: float,
        are_gone: Callable[[list[int]], bool],
    ) -> None:
        self._store, self._rank, self._members, self._timeout_s = store, rank, members, timeout_s
        self._are_gone = are_gone
        self._set("ended", RUNNING)

    def begin(self, steps: int) -> None:
        """Record that this rank has begun `steps` steps; costs one store operation."""
        self._set("begun", str(steps))

    def outlast(self, steps: int) -> Iterator[int]:
        """Record that this rank has ended after `steps` steps, then yield each further step as another rank begins it.

        Returns when all have ended and no rank has done more. Raises `DeadlineExceeded` with the ranks that began no
        step within the timeout, `PeerLost` if one is gone.
        """
        self._set("ended", str(steps))
        latest_s, before = now_s(), {0: ""}
        while True:
            ends, begun = self._all("ended"), self._all("begun")
            running = [rank for rank, end in ends.items() if end == RUNNING]
            done = [int(end) for end in ends.values() if end != RUNNING]
            if max([*done, *(int(begun[rank]) for rank in running if rank in begun)]) > steps:
                yield steps
                steps += 1
            elif not running:
                return
            if begun != before:
                latest_s, before = now_s(), begun
            self._wait(running, latest_s)

    def last(self) -> int:
        """Return the lowest rank of those that did most steps; call it once all have ended."""
        ends = {rank: int(end) for rank, end in self._all("ended").items()}
        return max(ends, key=lambda rank: (ends[rank], -rank))

    def _wait(self, running: list[int], latest_s: float) -> None:
        if running and self._are_gone(running):
            raise PeerLost("a rank that had not ended is gone: look at its output", Place(self._rank))
        if now_s() - latest_s > self._timeout_s:
            what = (
                f"ranks {running} began no step within {self._timeout_s:g} s, and have not ended: look at their output"
            )
            raise DeadlineExceeded(what, Place(self._rank, next(iter(running), None)))
        Event().wait(LOOK_S)

    def _set(self, what: str, value: str) -> None:
        call_store(lambda: self._store.set(f"{what}/{self._rank}", value), self._timeout_s + STORE_ANSWER_S, self._rank)

    def _all(self, what: str) -> dict[int, str]:
        keys = {rank: f"{what}/{rank}" for rank in self._members()}
        limit_s = self._timeout_s + STORE_ANSWER_S
        data = call_store(lambda: {rank: self._store.get(key) for rank, key in keys.items()}, limit_s, self._rank)
        return {rank: parse(keys[rank], word, _word) for rank, word in data.items()}


def _word(data: bytes) -> str:
    word = data.decode()
    require(word == RUNNING or int(word) >= 0)
    return word
