# SPDX-License-Identifier: Apache-2.0
"""Generations: numbered lists of live ranks on the store, changed by compare-and-set only; and who
lives.

The key ``head`` holds the current generation, so a generation is either the current one or not, for
everybody at once. The head also says how far the latest collective has come, so that two things
follow from one compare-and-set: all members begin a collective or none does, also if a generation
ends at that instant; and no process takes the place of a lost rank in the middle of a collective.

Each process listens on a port that its kernel closes when it ends, however it ends. A broken
connection says nothing, and a store does not know who has died. A process that is only stopped
still counts as alive: its kernel answers.
"""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event
from types import MappingProxyType
from typing import NamedTuple

from commrt.elastic.links import LOOK_S, LinkCheck, probe, send_message
from commrt.errors import TransportError, UsageError
from commrt.runtime.membership import Loss
from commrt.store.addresses import own_address
from commrt.store.client import TimedStore
from commrt.store.parsing import parse, parse_int, require, typed
from commrt.store.rendezvous import listen
from commrt.threads.deadline import Timeouts
from commrt.threads.forking import release_in_forked_child
from commrt.threads.starting import start_thread

HEAD = "head"
ROLL_CALL = 0
"""In place of the number of a collective."""
OPEN = "open"
GATHERING = "gathering"
RUNNING = "running"
"""Of the latest collective: no rank is in it, ranks wait for the others, all members have come."""
CLOSED_ERRNOS = (errno.EBADF, errno.EINVAL)
"""What ``accept`` reports for a socket that was closed."""
NOBODY: Mapping[int, int] = MappingProxyType({})
UNKNOWN, REPLACED = NO_ADDRESSES = "", "another process has its place"
"""In place of the address of a process."""
UNEQUAL_STEPS = (
    "put the loop into `with replica.join():` if ranks have different numbers of batches, and run"
    " the same passes outside of no_sync() on all ranks"
)
OTHER_CALL = "make the same collective calls in the same order on all ranks"
ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255} [0-9]{1,5}")


class Generation(NamedTuple):
    """The live ranks, and from which step on they exchange with each other."""

    number: int
    members: Mapping[int, int]
    """By rank, in ascending order: the incarnation of its process, 0 for the first."""
    start: int = 0
    """The first training step that they exchange in; members of gossip train alone until then."""
    lost: tuple[Loss, ...] = ()
    """All ranks that are missing, in the order in which they were lost."""
    silent: tuple[int, ...] = ()
    """Members that live, but did not answer the roll call.

    They have no connections until they make one themselves.
    """
    haste: int = 0
    """How many generations in a row, up to this one, left out a rank that the one before had."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return tuple(self.members)

    @property
    def connected(self) -> tuple[int, ...]:
        """The members that have connections to each other, in ascending order."""
        return tuple(rank for rank in self.members if rank not in self.silent)

    def successor(
        self,
        losses: Sequence[Loss],
        start: int,
        *,
        silent: Sequence[int] = (),
        joined: Mapping[int, int] = NOBODY,
    ) -> Generation:
        """The next generation: without the lost ranks, and with the new processes that have
        `joined`.
        """
        gone = {loss.rank for loss in losses}
        stay = {rank: incarnation for rank, incarnation in self.members.items() if rank not in gone}
        lost = tuple(loss for loss in (*self.lost, *losses) if loss.rank not in joined)
        haste = 0 if {*silent} <= {*self.silent} else self.haste + 1
        members = dict(sorted({**stay, **joined}.items()))
        return Generation(self.number + 1, members, start, lost, tuple(silent), haste)

    def changes_since(self, before: Generation) -> list[str]:
        """Return a sentence for each rank that was lost, replaced or silent since the generation
        `before`.
        """
        lost = [str(loss) for loss in self.lost if loss not in before.lost]
        replaced = [
            rank for rank, process in self.members.items() if before.members.get(rank) != process
        ]
        places = {*before.members, *(loss.rank for loss in before.lost)}
        silent = [rank for rank in self.silent if rank not in before.silent]
        lost += [
            (
                f"a new process has the place of rank {rank}"
                if rank in places
                else f"rank {rank} has come"
            )
            for rank in replaced
        ]
        return lost + [f"rank {rank} does not answer, and is not waited for" for rank in silent]


class Head(NamedTuple):
    """What the store says is current."""

    generation: Generation
    collective: int = 0
    """The number of the latest collective that a rank came to; 0 before the first."""
    phase: str = OPEN
    """Of that collective; while it is `OPEN` a new process may become a member."""

    def has_begun(self, collective: int) -> bool:
        """True once all members have come to `collective`."""
        return self.collective > collective or (
            self.collective == collective and self.phase != GATHERING
        )

    def to_json(self) -> str:
        """All fields, for the store."""
        number, members, *others = self.generation
        return json.dumps([self.collective, self.phase, number, [*members.items()], *others])

    @classmethod
    def from_json(cls, text: bytes) -> Head:
        """Raise `ValueError` or the like for anything but the result of `to_json`."""
        collective, phase, *fields = typed(
            json.loads(text), int, str, int, list, int, list, list, int
        )
        require(phase in (OPEN, GATHERING, RUNNING))
        number, pairs, start, lost, silent, haste = fields
        members = dict(typed(pair, int, int) for pair in pairs)
        losses = tuple(Loss(*typed(loss, int, int, str, bool, int | None)) for loss in lost)
        return cls(
            Generation(number, members, start, losses, tuple(map(parse_int, silent)), haste),
            collective,
            phase,
        )


class Arrival(NamedTuple):
    """A rank that has come to a roll call or to the collective `what`, and the first step that it
    has not exchanged.
    """

    step: int
    what: str = ""
    unreached: Sequence[int] = ()
    """In a roll call: the members that do not reach this rank. Its latest line counts."""
    made: int | None = None
    """How many steps its loop has made: all ranks that meet must have made as many. None where they
    may differ, with backup workers and in ``join()``.
    """

    def difference(self, other: Arrival) -> tuple[str, str, str] | None:
        """Return what each of the two comes to and what to do, or None if they may meet."""
        if self.made != other.made and None not in (self.made, other.made):
            own, theirs = (f"{each.what} after {each.made} steps" for each in (self, other))
            return own, theirs, UNEQUAL_STEPS
        return None if self.what == other.what else (self.what, other.what, OTHER_CALL)


def arrival_key(generation: Generation, collective: int) -> str:
    """Return the key under which members of `generation` say that they have come to a collective,
    or `ROLL_CALL`.

    Each writes a line: its rank, and the fields of its `Arrival`.
    """
    return f"arrived/{generation.number}.{collective}"


def refusal_key(collective: int) -> str:
    """Return the key under which a rank says why members cannot meet in a collective; the same in
    all generations.
    """
    return f"refused/{collective}"


def joining_key(generation: Generation) -> str:
    """Return the key under which new processes say that they want to be in the generation after
    `generation`.

    Each writes a line: rank, incarnation, and the number of collectives that its state has made.
    """
    return f"joining/{generation.number}"


def wake_key(rank: int, target: int) -> str:
    """Return the key for which `rank` waits, to learn that others form generation `target`."""
    return f"called/{rank}/{target}"


class Listener:
    """Shows that this process lives, to every process that can reach the host `towards`.

    A thread calls `serve` with each connection. The default closes it.
    """

    def __init__(
        self,
        towards: str,
        serve: Callable[[socket.socket], None] = socket.socket.close,
        name: str = "commrt-liveness",
    ) -> None:
        host = own_address(towards)
        try:
            self._socket = listen(host)
        except OSError as error:
            raise TransportError(
                f"this process cannot listen at {host} ({error}): is there a limit on open files"
                " (`ulimit -n`)"
            ) from error
        self.address = f"{host} {self._socket.getsockname()[1]}"
        release_in_forked_child(self)
        start_thread(_accept, name, self._socket, serve)

    def close(self) -> None:
        """Stop listening, so that the process counts as gone. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread would keep it open
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Close the socket in a forked child, which must not answer for its parent."""
        self._socket.close()


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while listener.fileno() >= 0:
        try:
            client = listener.accept()[0]
        except OSError as error:
            if error.errno in CLOSED_ERRNOS:
                return
            Event().wait(1.0)  # no descriptors left; the kernel answers meanwhile
            continue
        serve(client)


class Processes:
    """The processes of all ranks: which one has a rank's place now, and whether it lives. On any
    thread.

    Each process writes its incarnation (how many processes had the rank's place before it) and its
    address on the store. Without a `host` that all can reach (ranks are threads of one process) no
    process ever counts as gone.
    """

    def __init__(
        self, store: TimedStore, rank: int, host: str | None, timeout_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._listener = None if host is None else Listener(host, send_message)
        self._addresses: dict[tuple[int, int], str] = {}  # by rank and incarnation
        self._silent = frozenset[str]()  # addresses whose hosts gave no answer the last time
        self.incarnation = 0
        """Of this process."""

    def register(self) -> None:
        """Publish the address of this process, the first of its rank."""
        if self._listener is not None:
            self._publish("", self._listener)

    def replace(self, *, is_new: bool = False) -> None:
        """Publish this process in place of the last one of its rank; raise `UsageError` if two do
        so at once.

        One that `is_new` comes to a place that perhaps no process has had.
        """
        latest = self._latest(self._rank)
        if self._listener is None or (latest is None and not is_new):
            raise UsageError(
                f"rank {self._rank} has left no address on the store, so no process can take its"
                " place"
            )
        self.incarnation = 0 if latest is None else latest[0] + 1
        self._publish("" if latest is None else json.dumps(latest), self._listener)

    def _publish(self, before: str, listener: Listener) -> None:
        own = json.dumps([self.incarnation, listener.address])
        if self._store.compare_set(f"process/{self._rank}", before, own) != own.encode():
            raise self._taken()

    def _taken(self) -> UsageError:
        return UsageError(f"two processes take the place of rank {self._rank} at once: start one")

    def require_latest(self) -> None:
        """Raise `UsageError` if another process has the place of this one."""
        if (latest := self._latest(self._rank)) is not None and latest[0] != self.incarnation:
            raise self._taken()

    def answers(self, rank: int) -> bool:
        """Return True if the latest process of `rank` lives, as far as this host can tell."""
        latest = self._latest(rank)
        return latest is not None and probe([latest[1]], self._probe_s)[latest[1]] is True

    def gone(self, processes: Mapping[int, int]) -> list[int]:
        """Return the ranks of those `processes`, given with their incarnations, that do not live.

        A process on an unreachable host may be alive, and takes longest; but only the first time.
        """
        if self._listener is None:
            return []
        addresses = {rank: self._address(rank, each) for rank, each in processes.items()}
        known = {*addresses.values()}.difference(NO_ADDRESSES)
        found = probe(known - self._silent, self._probe_s) | probe(known & self._silent, LOOK_S)
        self._silent = (self._silent - known) | {
            address for address, answer in found.items() if answer is None
        }
        return [
            rank
            for rank, address in addresses.items()
            if address == REPLACED or found.get(address) is False
        ]

    def _address(self, rank: int, incarnation: int) -> str:
        """Return the address of that process of `rank`, or `REPLACED` or `UNKNOWN`."""
        if (rank, incarnation) not in self._addresses:
            if (latest := self._latest(rank)) is None or latest[0] != incarnation:
                return REPLACED if latest is not None and latest[0] > incarnation else UNKNOWN
            self._addresses[rank, incarnation] = latest[1]
        return self._addresses[rank, incarnation]

    def check_links(self, members: Mapping[int, int]) -> LinkCheck:
        """Begin to check who of `members`, given with their incarnations, reaches this process."""
        others = (
            {rank: each for rank, each in members.items() if rank != self._rank}
            if self._listener
            else {}
        )
        addresses = {rank: self._address(rank, each) for rank, each in others.items()}
        known = {
            rank: address for rank, address in addresses.items() if address not in NO_ADDRESSES
        }
        return LinkCheck(known, self._probe_s)

    @property
    def _probe_s(self) -> float:
        return Timeouts.of(self._timeout_s()).probe_s

    def _latest(self, rank: int) -> tuple[int, str] | None:
        """Return the incarnation and the address of the latest process of `rank`."""
        text = self._store.read(key := f"process/{rank}")
        return parse(key, text, _parse_process) if text else None

    def close(self) -> None:
        """Stop listening: from now on this process counts as gone. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()


def _parse_process(text: bytes) -> tuple[int, str]:
    incarnation, address = typed(json.loads(text), int, str)
    require(ADDRESS.fullmatch(address) and int(address.split()[1]) < 65536)
    return incarnation, address
