# SPDX-License-Identifier: Apache-2.0
"""Did all come through? The first outcome stands and is everybody's: whole if all say so, lost as soon as one does not.

What ranks did together counts only if it was whole, so that nobody has what others will never get.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from time import monotonic
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import TransportError
from commrt.store.asking import ANSWER_S, ask
from commrt.store.hearsay import understood

__all__ = ["Vote", "Votes"]

LOOK_S, LOOK_MOST_S = 0.002, 0.2
"""Between two looks at the store, first and at most: each time it is twice as long."""
LINGER_S = 5.0
"""How long the first member, which may hold the store, waits for the others to read the outcome."""
WHOLE, LOST = "whole", "lost"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vote:
    """Of `members`, on a shelf of the store that is used once."""

    shelf: Store
    rank: int
    members: Sequence[int]
    timeout_s: float
    are_gone: Callable[[Collection[int]], bool]
    """True if one of the ranks given will never say anything."""
    mark: str = ""
    """Of what was done, without blanks: what ranks with different ones did is lost."""

    def outcome(self, came_through: bool) -> bool:
        """What stands once this rank has said whether it `came_through`; waits for the others if it has.

        A member that is gone, or says nothing within `timeout_s`, did not. Raises `DeadlineExceeded` or `PeerLost` if
        the store gives no answers.
        """
        if came_through:
            self._append("through")
        else:
            self._settle(LOST)
        is_whole = self._await() == WHOLE
        if is_whole:  # else they will meet again
            with suppress(TransportError):  # it is known
                self._leave()
        return is_whole

    def _await(self) -> str:
        begin_s, looks = monotonic(), _pauses()
        while not self._asked(lambda: self.shelf.check(["outcome"])):
            said = self._said("through")
            silent = set(self.members) - said.keys()
            if not silent:
                self._settle(WHOLE if len({*said.values()}) == 1 else LOST)
            elif monotonic() - begin_s > self.timeout_s or self.are_gone(silent):
                self._settle(LOST)
            else:
                Event().wait(next(looks))
        return self._asked(lambda: self.shelf.get("outcome")).decode(errors="replace")

    def _leave(self) -> None:
        self._append("read")
        if self.rank != self.members[0]:
            return
        begin_s, looks = monotonic(), _pauses()
        while (silent := set(self.members) - self._said("read").keys()) and monotonic() - begin_s < LINGER_S:
            if self.are_gone(silent):
                return
            Event().wait(next(looks))
        if not silent:  # nobody comes back to this
            for key in ("through", "outcome", "read"):
                self._asked(partial(self.shelf.delete_key, key))

    def _settle(self, outcome: str) -> None:
        self._asked(lambda: self.shelf.compare_set("outcome", "", outcome))

    def _append(self, list_name: str) -> None:
        said = f"{self.rank}:{self.mark} "
        self._asked(lambda: self.shelf.append(list_name, said))  # type: ignore[attr-defined]  # torch's stub is behind

    def _said(self, list_name: str) -> dict[int, str]:
        """The marks, by rank."""
        found = self._asked(lambda: self.shelf.get(list_name) if self.shelf.check([list_name]) else b"")
        return understood(list_name, found, _marks)

    def _asked(self, question: Callable[[], T]) -> T:
        return ask(question, self.timeout_s + ANSWER_S, self.rank)


def _marks(said: bytes) -> dict[int, str]:
    words = (word.partition(":") for word in said.decode().split())
    return {int(rank): mark for rank, _, mark in words}


def _pauses() -> Iterator[float]:
    pause_s = LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LOOK_MOST_S)


class Votes:
    """Of one rank, one after another in each generation: who came to it later has missed those before."""

    def __init__(
        self,
        store: Store,
        rank: int,
        timeout_s: Callable[[], float],
        are_gone: Callable[[Collection[int]], bool],
    ) -> None:
        self._store, self._rank, self._timeout_s, self._are_gone = store, rank, timeout_s, are_gone
        self._latest = (0, 0)  # in which generation, and which it was there

    def outcome(self, came_through: bool, generation: int, members: Sequence[int], mark: str) -> bool:
        """See `Vote.outcome`, of the `members` of `generation`."""
        self._latest = generation, self._latest[1] + 1 if self._latest[0] == generation else 1
        shelf = PrefixStore("vote {}.{}".format(*self._latest), self._store)
        return Vote(shelf, self._rank, members, self._timeout_s(), self._are_gone, mark).outcome(came_through)

    def close(self) -> None:
        """Hold the store no more."""
        self._store = HashStore()
