# SPDX-License-Identifier: Apache-2.0
"""Which ranks still take part, and how those that are left agree on it after one was lost.

All that is said is one log on the store (`commrt.members.attendance`), of which everybody reads the whole.

Who breaks its connections says so first. So a rank that is missed and says nothing is gone, or stopped. Those who wait
look after those who do not come (`commrt.store.doorbell`), and a rank of which only a connection broke is not missed
while it lives. The first verdict stands, and is everybody's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Event
from time import monotonic
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import LeftBehind, PeerLost, Place, QuorumLost, TransportClosed, TransportError, UsageError
from commrt.members.attendance import HERE, LEFT, MISSED, Attendance, Loss, Need, Verdict, birth, lines_of
from commrt.store.asking import ANSWER_S, another_connection, ask
from commrt.store.doorbell import Doorbell, answers, is_gone
from commrt.store.hearsay import understood, where
from commrt.threads.patience import Patience

__all__ = ["Membership"]

LOOK_S = 0.05
"""Between two looks of the first who came; the k-th looks k times less often, so that the store is not kept busy."""
LOOK_MOST_S = 1.0
AGAIN_S = 0.2
FIRST = "0"
"""The birth of those that began together, for a bell."""

_log = logging.getLogger("commrt")

T = TypeVar("T")


class Membership:
    """As one rank knows it. For one thread at a time, except `leave`.

    Others look after this process from `towards`, an address in their network.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        towards: str | None = None,
        timeout_s: Callable[[], float] = lambda: ANSWER_S,
    ) -> None:
        self._store: Store = PrefixStore("members", store)
        self._rank, self._towards, self._timeout_s = rank, towards, timeout_s
        self._doorbell: Doorbell | None = None
        self._bell: str | None = None  # its address, and the birth of this process
        self._predecessor: str | None = None
        self._page, self._is_in = 0, False
        self._all = tuple(members)
        self._again_s = 0.0
        self._need: Need | None = None
        self._bells: dict[int, str] = {}  # by rank, of those that were looked after
        self._connected: dict[int, str] = {}  # of the processes that are members of this generation
        self.members = tuple(members)
        self.generation = 0
        """How often they have come together again."""
        self.lost: tuple[Loss, ...] = ()
        """All so far, in the order in which they were."""

    def enter(self, need: Need | None = None) -> None:
        """Take part, on a new page of the log, and let the others see whether this process is alive; collective."""
        self._page, self._is_in, self._need, self._bells = self._page + 1, True, need, {}
        self._store = another_connection(self._store)  # while one waits on the first for peers to connect
        if self._towards is not None:
            self._doorbell = Doorbell(self._towards)
            self._take_place(self._doorbell)
        self._predecessor = None

    def require_vacant(self) -> None:
        """Raise `UsageError` if another process of this rank answers; before `enter`."""
        bell = self._predecessor = self._address(self._rank, self._page + 1)
        if bell is not None and answers(_where(bell)):
            raise UsageError(
                f"a process of rank {self._rank} answers at {_where(bell)}: another can take its place once it has "
                "ended; if nobody meant that, two were started with one rank's variables"
            )

    def _take_place(self, doorbell: Doorbell) -> None:
        """Of the predecessor that was seen, and of no other."""
        old = self._predecessor
        self._bell = bell = f"{0 if old is None else birth(old) + 1} {doorbell.address}"
        key = f"bell/{self._page}/{self._rank}"
        if self._asked(lambda: self._store.compare_set(key, old or "", bell)) != bell.encode():
            self._is_in = False
            doorbell.close()
            raise UsageError(
                f"two processes take the place of rank {self._rank} at once, and the other one came first: start one"
            )

    def miss(self, failure: TransportError) -> None:
        """Tell the others that this rank is about to break its connections because of `failure`."""
        peer = None if self._tells(failure) else failure.place.peer
        why = f"rank {self._rank} saw {type(failure).__name__}: {failure.what}"
        self._say(MISSED, self.generation + 1, self._rank, peer, why)

    def _tells(self, failure: TransportError) -> bool:
        """True if the peer's doorbell will say whether it is gone."""
        peer = failure.place.peer
        return isinstance(failure, PeerLost) and peer is not None and self._address(peer) is not None

    def leave(self, why: str, *, in_order: bool = False) -> None:
        """Tell the others not to wait for this rank; from any thread, and safe to call twice."""
        if self._is_in:
            self._is_in = False
            with suppress(RuntimeError, TransportError):  # the store is gone, and so are they
                self._say(LEFT, self.generation, self._rank, why, self._bell, in_order, limit_s=ANSWER_S)
        if self._doorbell is not None:
            self._doorbell.close()

    def stand_aside(self, why: str) -> None:
        """Tell the others not to wait for this rank until it comes back."""
        self._say(LEFT, self.generation, self._rank, why, self._bell)

    def close(self) -> None:
        """After `leave`: hold the store no more."""
        self._store = HashStore()

    def assemble(self, step: int, timeout_s: float, require_open: Callable[[], None]) -> int:
        """Wait for all that are left, and agree on who they are; the step from which all of them exchange again.

        `require_open` is called now and then, and may raise. Raises `LeftBehind` if they did not wait for this rank,
        `DeadlineExceeded` or `PeerLost` if the store is gone.
        """
        self.generation += 1
        self._say(HERE, self.generation, self._rank, step, self._bell)
        patience, promised = Patience(timeout_s), set[int]()
        while (verdict := self._standing()) is None:
            require_open()
            attendance = self._attendance()
            if self._rank in attendance.left:
                raise LeftBehind("this rank has left, or was found gone", Place(self._rank, step=step))
            outside = self._outside(attendance)
            if own := attendance.verdict(self.members, patience.waited_s, timeout_s, self._need, promised, outside):
                self._propose(own)
            else:
                Event().wait(min(self._pause_s(attendance), patience.most_s))
                self._look_after(attendance, outside, promised, patience)
        if self._rank not in verdict.members:
            what = f"the other ranks went on without this one, which came too late: {_reason(verdict, self._rank)}"
            raise LeftBehind(what, Place(self._rank, step=verdict.step))
        self.members, self._connected = verdict.members, dict(verdict.bells)
        finished = {loss.rank for loss in self.lost if loss.in_order}
        news = [loss for loss in verdict.lost if loss.rank not in finished]
        lost = {loss.rank: loss for loss in (*self.lost, *news)}
        self.lost = tuple(loss for rank, loss in lost.items() if rank not in verdict.members)
        return verdict.step

    def require_enough(self, step: int) -> None:
        """Raise `QuorumLost` if fewer are left than make a step."""
        members, need = self.members, self._need
        finished = [loss for loss in self.lost if loss.in_order]
        if need is not None and len(members) + len(finished) < need.members:
            what = (
                f"ranks {list(members)} are left, fewer than the {need.members} whose gradients make a step: start "
                "again from a checkpoint, with more backups or fewer ranks"
            )
            raise QuorumLost(f"{self.lost[-1]}. {what}", Place(self._rank, step=step))

    def tell_since(self, lost: Sequence[Loss], members: Sequence[int]) -> None:
        """Log what has changed since these were `lost` and those `members`."""
        level = logging.WARNING if self._rank == self.members[0] else logging.INFO
        for loss in (loss for loss in self.lost if loss not in lost):
            _log.log(level, "commrt: %s; %d ranks go on", loss, len(self.members))
        for rank in (rank for rank in self.members if rank not in members):
            _log.log(level, "commrt: rank %d has come back; %d ranks go on", rank, len(self.members))

    def _outside(self, attendance: Attendance) -> list[int]:
        """Those who live, but were no members before, or stand aside; they come of themselves, or if needed."""
        away = [rank for rank in self._all if rank not in attendance.here] if self._need is not None else []
        strangers = [rank for rank in away if rank not in self.members or rank in attendance.left]
        return [rank for rank in strangers if self._address(rank) is not None and not self._is_gone(rank)]

    def follow(self) -> None:
        """Learn to which generation the others have come without this rank.

        Raises `TransportClosed` if another process has taken its place.
        """
        self._require_own_place()
        self.generation += 1
        while (verdict := self._standing()) is not None:
            self.members = verdict.members
            self.generation += 1
        self.generation -= 1

    def _require_own_place(self) -> None:
        if self._bell is not None and self._address(self._rank) != self._bell:
            self._is_in = False  # and says nothing more
            raise TransportClosed("another process has taken the place of this one", Place(self._rank))

    def _standing(self) -> Verdict | None:
        key = f"verdict {self.generation}"
        said = self._asked(lambda: self._store.get(key) if self._store.check([key]) else None)
        if said is None:
            return None
        return understood(key, said, Verdict.read)

    def _attendance(self) -> Attendance:
        said = self._asked(lambda: self._store.get(f"log {self._page}"))
        lines = understood("log of members", said, lines_of)
        return Attendance.of(lines, self.generation, may_return=self._need is not None)

    def _propose(self, verdict: Verdict) -> None:
        self._asked(lambda: self._store.compare_set(f"verdict {self.generation}", "", json.dumps(verdict)))

    def _look_after(
        self, attendance: Attendance, outside: Sequence[int], promised: set[int], patience: Patience
    ) -> None:
        """See whether those who are not here live, and will come; those `outside`, if too few do."""
        for rank in attendance.absent(self.members):
            if self._member_is_gone(rank):
                why = f"rank {self._rank} found that its process is gone"
                self._say(LEFT, self.generation, rank, why, self._connected.get(rank, FIRST))
            else:
                self._summon(rank, promised)
            patience.look()  # one that is silent costs half a second
        if self._lacks_some(attendance, promised, patience):
            for rank in outside:
                self._summon(rank, promised)
                patience.look()

    def _lacks_some(self, attendance: Attendance, promised: set[int], patience: Patience) -> bool:
        if self._need is None:
            return False
        is_early = patience.waited_s < min(self._need.patience_s, self._timeout_s() / 2)
        return attendance.is_short(self.members, self._need.members, promised, is_early=is_early)

    def _summon(self, rank: int, promised: set[int]) -> None:
        if self._need is not None and rank not in promised and self._need.summon(rank, self.generation):
            promised.add(rank)

    def _pause_s(self, attendance: Attendance) -> float:
        place = 1 + list(attendance.here).index(self._rank)
        return min(LOOK_S * place, LOOK_MOST_S)

    def are_gone(self, ranks: Iterable[int]) -> bool:
        """True if `disconnected` finds one; asks no more often than each `AGAIN_S`."""
        if monotonic() < self._again_s:
            return False
        found = bool(self.disconnected(ranks))
        self._again_s = monotonic() + AGAIN_S
        return found

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those whose process does not live, nor another in its place."""
        return [rank for rank in ranks if self._is_gone(rank)]

    def disconnected(self, ranks: Iterable[int]) -> list[int]:
        """Those whose process does not live with which this generation was to connect."""
        return [rank for rank in ranks if self._member_is_gone(rank)]

    def _member_is_gone(self, rank: int) -> bool:
        """True if that process does not live, whether or not another has come in its place."""
        known = self._connected.get(rank)
        if known is not None:
            return is_gone(_where(known))
        bell = self._address(rank)
        return bell is not None and (birth(bell) > birth(FIRST) or is_gone(_where(bell)))

    def _is_gone(self, rank: int) -> bool:
        known = self._bells.get(rank)
        if known is not None and not is_gone(_where(known)):
            return False
        bell = self._address(rank)  # another process may have taken its place
        if bell is not None:
            self._bells[rank] = bell
        return bell is not None and is_gone(_where(bell))

    def _address(self, rank: int, page: int | None = None) -> str | None:
        key = f"bell/{self._page if page is None else page}/{rank}"
        said = self._asked(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if said is None else understood(key, said, where)

    def _asked(self, question: Callable[[], T]) -> T:
        return ask(question, self._timeout_s() + ANSWER_S, self._rank)

    def _say(self, *line: object, limit_s: float | None = None) -> None:
        said, limit_s = json.dumps(line) + "\n", self._timeout_s() + ANSWER_S if limit_s is None else limit_s
        ask(lambda: self._store.append(f"log {self._page}", said), limit_s, self._rank)  # type: ignore[attr-defined]  # torch's stub is behind


def _reason(verdict: Verdict, rank: int) -> str:
    return next((loss.why for loss in verdict.lost if loss.rank == rank), "it was lost before")


def _where(bell: str) -> str:
    """The doorbell's address."""
    return bell.partition(" ")[2]
