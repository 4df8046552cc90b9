# SPDX-License-Identifier: Apache-2.0
"""What failing ranks leave on the store, so that the error of each names what its peers saw.

Only `commrt.runtime.ending` calls it, on the thread that notices a failure or closes the world,
which may have to wait. Writes to the store, and to the error that it is given. No error of the
store leaves these functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import NamedTuple, TypeVar

from torch.distributed import Store

from commrt.errors import PeerLost, TransportError
from commrt.store.client import call_store
from commrt.store.parsing import MALFORMED, typed
from commrt.threads.deadline import Deadline

LINGER_S = 3.0
"""How long a failing rank that holds the store waits for the others to read the reports."""
POLL_S = 0.01
GRACE_S = 1.0
BROKEN_GRACE_S = 0.1
"""How much later than this rank a peer may report after a deadline or a broken connection.

Gloo breaks one at the deadline itself. A rank of one host breaks its connections after its report.
"""

CLOSED = "rank {peer} had closed its world or process group{after} and makes no more calls: {do}"
JOIN = (
    "if a rank ran out of data, wrap the loop in replica.join(), with DDP in model.join(), or call"
    " replica.average() there"
)
CALL = "call {name} on every rank, not under `if rank == 0:`"
ORDER = "make both calls on every rank, in one order, and neither under `if rank == 0:`"
PASSES = (
    "run as many backward passes on every rank: evaluate under torch.no_grad(), and put all but the"
    " last pass of an accumulation in replica.no_sync()"
)
BACKWARD = "backward()"
NUMBERED = "with sequence number"
"""How `Call.when` begins for calls of a process group."""

T = TypeVar("T")


class Call(NamedTuple):
    """What a rank's program was doing when it failed."""

    name: str
    """What a user types, such as `BACKWARD`; empty if that is not known."""
    when: str = ""
    """Which of several such calls, such as ``of step 3``."""
    after: str = ""
    """The call before, if that was made since the latest step."""

    def __str__(self) -> str:
        after = f" (after {self.after})" if self.after else ""
        return f"{self.name} {self.when}".rstrip() + after

    @property
    def advice(self) -> str:
        """What to do where another rank does not make this call."""
        if self.name in ("", BACKWARD):
            return JOIN
        return f"{CALL.format(name=self.name)}; {JOIN}"

    def differs_from(self, other: Call) -> bool:
        """Return True if two ranks cannot be there at once, as far as is known.

        Of numbered calls one rank may have made more than another.
        """
        if "" in (self.name, other.name):
            return False
        if self.when.startswith(NUMBERED) and other.when.startswith(NUMBERED):
            return self.when == other.when and self.name != other.name
        return self != other

    def advice_beside(self, other: Call) -> str:
        """Return what to do if another rank was in the call `other`."""
        calls = [each.name for each in (self, other) if each.name != BACKWARD]
        calls = calls or sorted({self.after, other.after} - {""})
        if not calls:
            return f"{PASSES}; {JOIN}"
        return ORDER if len(calls) > 1 else f"{CALL.format(name=calls[0])}; {JOIN}"


UNKNOWN = Call("")


def leave_report(store: Store, rank: int, failure: BaseException, where: Call = UNKNOWN) -> bool:
    """Write what `rank` saw to `store`, and in which call; return False if that does not answer."""
    peer = failure.place.peer if isinstance(failure, TransportError) else None
    report = json.dumps([peer, f"{type(failure).__name__}: {failure}", *where])

    key = f"report/{rank}"

    def write() -> bool:
        store.set(key, report)
        return bool(store.check([key]))  # torch does not wait for an answer to `set`

    return bool(_answered(write))


def note_closed(store: Store, rank: int, steps: int | None) -> None:
    """Write to `store` that `rank` has closed its world after `steps`, without a failure."""
    after = "" if steps is None else f" after {steps} steps"
    _answered(lambda: store.set(_closed_key(rank), after))


def _closed_key(rank: int) -> str:
    return f"has closed/{rank}"


def diagnose(
    store: Store,
    rank: int,
    size: int,
    failure: BaseException,
    where: Call = UNKNOWN,
    *,
    one_host: bool = False,
) -> None:
    """Set ``failure.elsewhere`` to what the peers saw for which it waited, or others for it.

    If a peer was in another call than `where`, that is why: ``failure.what`` begins with both.

    Counts this rank on the store among those that have read the reports. If all are on `one_host`,
    who breaks a connection has reported already, or is dead.
    """
    broken_grace_s = 0.0 if one_host else BROKEN_GRACE_S
    if isinstance(failure, TransportError) and failure.place.peer is not None:
        first = failure.place.peer
        kind = type(failure).__name__
        trail = _Trail(store, rank, where, broken_grace_s)
        sentences = _answered(lambda: list(trail.follow(first, kind)), GRACE_S)
        failure.elsewhere = ". ".join(sentences or ())
        if trail.cause:
            failure.what = f"{trail.cause}. Here: {failure.what}"
    _answered(lambda: _count(store, size))


def wait_for_readers(store: Store) -> None:
    """Keep this process's store until the others have read the reports, at most `LINGER_S`."""
    _answered(lambda: store.wait(["reports read"], timedelta(seconds=LINGER_S)), LINGER_S)


class _Trail:
    """Follows who waited for whom from `rank`, which was in call `where`; for one thread, once."""

    def __init__(self, store: Store, rank: int, where: Call, broken_grace_s: float) -> None:
        self._store = store
        self._rank = rank
        self._where = where
        self._broken_grace_s = broken_grace_s
        self.cause = ""
        """How the calls of two ranks differ, and what to do, if one of them shows that."""

    def follow(self, peer: int | None, saw: str) -> Iterator[str]:
        """Yield what `peer` reported, and for whom it waited itself; `saw` is this rank's error.

        A rank that reported nothing ended or stopped: that is why, whatever calls others were in.
        """
        store = self._store
        seen = {self._rank}
        beyond: list[str] = []  # what those reported that were in other calls, or waited for them
        while peer is not None and peer not in seen:
            seen.add(peer)
            if store.check([_closed_key(peer)]):
                after = store.get(_closed_key(peer)).decode()
                self.cause = CLOSED.format(peer=peer, after=after, do=self._where.advice)
                return
            is_broken = saw.startswith(PeerLost.__name__)
            deadline = Deadline(self._broken_grace_s if is_broken else GRACE_S)
            while not store.check([f"report/{peer}"]) and deadline.left_s > 0:
                # a request that waits would hold up all groups that share its connection
                Event().wait(POLL_S)
            if not store.check([f"report/{peer}"]):
                self.cause = ""
                yield from beyond
                yield f"Rank {peer} reported nothing: look there first"
                return
            report = json.loads(store.get(f"report/{peer}"))
            waited_for, saw, *other = typed(report, int | None, str, str, str, str)
            call = Call(*other)
            if not self.cause and self._where.differs_from(call):
                both = f"rank {self._rank} was in {self._where}, and rank {peer} in {call}"
                self.cause = f"{both}: {self._where.advice_beside(call)}"
            sentence = f"Rank {peer} saw {saw:.1000}"
            if self.cause:
                beyond.append(sentence)
            else:
                yield sentence
            peer = waited_for


def _count(store: Store, size: int) -> None:
    if store.add("reports", 1) >= size - 1:  # the one at fault leaves none
        store.set("reports read", "")


def _answered(request: Callable[[], T], waits_s: float = 0.0) -> T | None:
    """Return the store's answer or None: to this rank's failure a lost store adds nothing."""
    with suppress(RuntimeError, TransportError, *MALFORMED):
        return call_store(request, waits_s)
    return None
