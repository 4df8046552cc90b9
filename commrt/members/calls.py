# SPDX-License-Identifier: Apache-2.0
"""Which call of all ranks comes next, here and where most are over: so one that was away learns what it has missed.

And its name, so that ranks that make different calls learn that before they wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple, TypeVar

from torch.distributed import HashStore, Store

from commrt.errors import DisagreementError, LeftBehind, Place
from commrt.store.asking import ANSWER_S, ask
from commrt.store.hearsay import require, understood
from commrt.threads.patience import Patience

__all__ = ["Calls"]

T = TypeVar("T")

LATEST, NAMED = "latest", "named"
LOOK_S = 0.05
STILL = 4.0
"""How many deadlines others may need for a part: they lose a rank, find that out, connect anew, and do it again."""
Stand = tuple[int, int]
"""How many calls are over, and parts of the next one."""


class Calls:
    """Of one rank; the farthest that any has told stands on a shelf of the store. Others may be in one together.

    For the thread that trains, except `outlast` and `overtake`, which are for the lane as well.

    A call has parts, each of which is done by all or by nobody. A rank counts a call of which it entered a part, or in
    which an error ended its coming, and tells so when it goes on: who ends instead takes it from nobody. What all
    refuse as soon as they have come does not count: no rank waits for another there.
    """

    def __init__(
        self, store: Store, rank: int, timeout_s: Callable[[], float], are_gathered: Callable[[], bool]
    ) -> None:
        self._store: Store = store
        self._rank, self._timeout_s, self._are_gathered = rank, timeout_s, are_gathered
        self._own: Stand = (0, 0)
        self._told: Stand = (0, 0)  # by the one that is farthest, as far as this one knows
        self._what, self._counts = "", False  # of the call in which this rank is
        self._comings = 0  # to the next one, with those that all refused
        self._is_behind = False  # the others were in the call that it left last, and may still be

    @property
    def mark(self) -> str:
        """Which comes next; the same on ranks that have made the same calls."""
        return "{}.{}".format(*self._own)

    @property
    def is_missing_one(self) -> bool:
        """True while the others have done parts of a call, and this rank fewer."""
        latest = self._read()
        return latest[1] > 0 and (latest > self._own or self._is_behind)

    @contextmanager
    def coming(self, what: str, *, counts: bool = True) -> Iterator[None]:
        """To `what`; raises `LeftBehind` if that is over elsewhere, before others wait for this rank.

        They may still be in the one that it missed, while they are gathered: it does not take that from them. Raises
        `DisagreementError` if the first who came to the call came to another.
        """
        self._what, self._counts = what, counts
        self.outlast(lambda: self._is_behind and self._are_gathered() and self._read() < self._own)
        self._is_behind = False
        self.require_next(unless=self._is_refused)
        if counts:
            self._require_same()
        yield
        self._counts = False

    def outlast(self, is_so: Callable[[], bool], require_open: Callable[[], None] = lambda: None) -> None:
        """Wait while `is_so`, as long as the others come on with a call."""
        patience, known = Patience(self._timeout_s()), self._told
        while is_so() and patience.waited_s < self._timeout_s() * STILL:
            require_open()
            if known != self._told:
                patience, known = Patience(self._timeout_s()), self._told
            Event().wait(LOOK_S)

    def _require_same(self) -> None:
        mine = Named(self._own[0], self._comings, self._rank, self._what)
        self._comings += 1
        latest = self._named(None, mine)
        while latest[:2] < mine[:2]:
            latest = self._named(latest, mine)
        if latest[:2] == mine[:2] and latest.kind != mine.kind:
            raise DisagreementError(
                f"rank {self._rank} comes to {self._what} where rank {latest.rank} came to {latest.what}: let all "
                "ranks make the same calls of all, in the same order"
            )

    def _named(self, before: Named | None, after: Named) -> Named:
        """What stands after this rank has written `after` in place of `before`, if that stood there."""
        said = self._ask(lambda: self._store.compare_set(NAMED, "" if before is None else str(before), str(after)))
        return understood(NAMED, said, Named.read)

    def overtake(self) -> None:
        """The others are too few to do without this rank what it missed: that is over for them as well."""
        self._is_behind = False
        self._exchange()

    def give_up(self) -> None:
        """Leave to the others what this rank cannot do."""
        self._is_behind = True

    def enter(self) -> None:
        """A part of it."""
        self._counts = True

    def require_next(self, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Raise `LeftBehind` if what this rank is about to do is over elsewhere, `unless` there is a reason not to."""
        if self._exchange() > self._own and not unless():
            self._is_behind = True
            what = (
                f"{self._what}, to which rank {self._rank} comes now, is over for the others: a rank, perhaps this "
                f"one, was silent or busy for longer than the {self._timeout_s():g} s of the deadline, gave a call of "
                "all ranks up, or skipped one. Raise timeout_s, and let all ranks make the same calls"
            )
            self.leave()  # or who is called back at once would not know that it is over
            raise LeftBehind(what, Place(self._rank))

    def _is_refused(self) -> bool:
        """The others refused what this rank comes to, as it will, and have come to another call since."""
        latest = self._latest_name()
        return latest is not None and latest.call == self._own[0] and latest.coming > self._comings

    def complete(self) -> None:
        """A part, which was done by all."""
        self._own = self._own[0], self._own[1] + 1
        self._exchange()

    def leave(self) -> None:
        """What this rank came to is over for it."""
        if self._counts:
            self._counts, self._comings, self._own = False, 0, (self._own[0] + 1, 0)

    def go_on(self) -> None:
        """Train: who comes to an earlier one from now on comes too late."""
        self.release()
        if not self._is_behind and self._told < self._own:
            self._exchange()

    def release(self) -> None:
        """What this rank left to the others is over once none of them is in it any more, or who comes waits alone."""
        if self._is_behind and not self._are_gathered():
            self.overtake()

    def follow(self) -> None:
        """Do next what the others do next, who make no call meanwhile."""
        self._own = self._read()
        latest = self._latest_name()
        self._comings = 0 if latest is None or latest.call != self._own[0] else latest.coming + 1

    def _latest_name(self) -> Named | None:
        if not self._ask(lambda: self._store.check([NAMED])):
            return None
        return understood(NAMED, self._ask(lambda: self._store.get(NAMED)), Named.read)

    def close(self) -> None:
        """Hold the store no more."""
        self._store = HashStore()

    def _exchange(self) -> Stand:
        """The farthest that any rank has told, this one included."""
        latest = self._read()
        while latest < self._own:
            latest = self._swapped(latest)
        return latest

    def _swapped(self, latest: Stand) -> Stand:
        """What stands after this rank has written its own place in place of `latest`, if that stood there."""
        before, after = "{}.{}".format(*latest), self.mark
        return self._asked(lambda: self._store.compare_set(LATEST, before, after))

    def _read(self) -> Stand:
        return self._asked(lambda: self._store.compare_set(LATEST, "", "0.0"))

    def _asked(self, question: Callable[[], bytes]) -> Stand:
        self._told = understood(LATEST, self._ask(question), _stand)
        return self._told

    def _ask(self, question: Callable[[], T]) -> T:
        return ask(question, self._timeout_s() + ANSWER_S, self._rank)


class Named(NamedTuple):
    """What the first who came to a call came to."""

    call: int
    """How many were before."""
    coming: int
    """How many were refused since."""
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.call} {self.coming} {self.rank} {self.what}"

    @property
    def kind(self) -> str:
        """Without what it is about, which is compared elsewhere."""
        return self.what.partition(" ")[0]

    @classmethod
    def read(cls, said: bytes) -> Named:
        """Raises `ValueError` for what no rank would say."""
        *numbers, what = said.decode().split(" ", 3)
        call, coming, rank = map(int, numbers)
        named = cls(call, coming, rank, what)
        require(min(named[:3]) >= 0 and str(named).encode() == said)  # or nothing could be written in its place
        return named


def _stand(said: bytes) -> Stand:
    calls, parts = map(int, said.decode().split("."))
    require(calls >= 0 and parts >= 0 and f"{calls}.{parts}".encode() == said)
    return calls, parts
