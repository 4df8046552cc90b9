# SPDX-License-Identifier: Apache-2.0
"""Which call of all ranks comes next, here and where most are over: so one that was away learns what it has missed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch.distributed import HashStore, Store

from commrt.errors import CommrtError, LeftBehind, Place
from commrt.store.asking import ANSWER_S, ask
from commrt.store.hearsay import require, understood

__all__ = ["Calls"]

LATEST = "latest"


class Calls:
    """Of one rank; what is told to the others stands on a shelf of the store. For the thread that trains.

    A call has parts, each of which is done by all or by nobody. It is over whether it was done or ended in an error.
    """

    def __init__(self, store: Store, rank: int, timeout_s: Callable[[], float]) -> None:
        self._store: Store = store
        self._rank, self._timeout_s = rank, timeout_s
        self._place = (0, 0)  # how many are over, and parts of the next one
        self._has_begun = False

    @property
    def mark(self) -> str:
        """Which comes next; the same on ranks that have made the same calls."""
        return "{}.{}".format(*self._place)

    def begin(self) -> None:
        """Raise `LeftBehind` if it is over elsewhere."""
        self._has_begun = True
        if self._latest() > self._place:
            what = (
                f"what rank {self._rank} comes to now, call {self._place[0]} of all ranks, is over for the others: a "
                f"rank, perhaps this one, was silent or busy for longer than the {self._timeout_s():g} s of the "
                "deadline then, or skipped a call. Raise timeout_s, and let no rank skip one"
            )
            raise LeftBehind(what, Place(self._rank))

    def complete(self) -> None:
        """A part was done by all."""
        calls, parts = self._place
        self._move(calls, parts + 1)

    def leave(self) -> None:
        """The call that was begun is over; nothing if none was."""
        if self._has_begun:
            self._has_begun = False
            with suppress(CommrtError, RuntimeError):  # the store is gone: who needs it will say so
                self._move(self._place[0] + 1, 0)

    def follow(self) -> None:
        """Do next what the others do next, who make no call meanwhile."""
        self._place = self._latest()

    def close(self) -> None:
        """Hold the store no more."""
        self._store = HashStore()

    def _move(self, calls: int, parts: int) -> None:
        self._place, latest = (calls, parts), self._latest()
        while latest < self._place:
            latest = self._exchanged(latest)

    def _exchanged(self, latest: tuple[int, int]) -> tuple[int, int]:
        """What stands after this rank has written its own place in place of `latest`, if that stood there."""
        before, after = "{}.{}".format(*latest), self.mark
        return self._read(lambda: self._store.compare_set(LATEST, before, after))

    def _latest(self) -> tuple[int, int]:
        return self._read(lambda: self._store.compare_set(LATEST, "", "0.0"))

    def _read(self, question: Callable[[], bytes]) -> tuple[int, int]:
        return understood(LATEST, ask(question, self._timeout_s() + ANSWER_S, self._rank), _place)


def _place(said: bytes) -> tuple[int, int]:
    calls, parts = map(int, said.decode().split("."))
    require(calls >= 0 and parts >= 0)
    return calls, parts
