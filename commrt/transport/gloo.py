# SPDX-License-Identifier: Apache-2.0
"""Sockets between processes, through torch's Gloo backend: the CPU transport.

A Gloo backend object of our own on the given store; ``torch.distributed`` is never initialised, so a user's
own process groups are not touched.

Gloo has tags and does not compare sizes. A tag made of the transfer's number on its line and its size keeps
the order, and turns a disagreement about sizes into a deadline instead of silently wrong data.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError
from commrt.membership.store_client import STORE_ANSWER_S, call_store
from commrt.transport.protocol import CPU, Exchange, Group, Moment, Parcel, never, require_cpu, split_self, zeros

__all__ = ["Finish", "GlooTransport"]

MEDIUM = "Gloo"

Finish = Callable[[], None]
"""Waits for what was begun; raises `TransportError`."""

TAGS = 1 << 31
"""Gloo's tags are 32-bit and torch passes them as a signed int."""
NEVER = TAGS - 1
"""A tag that nobody sends with; see `GlooTransport.close`."""
POLL = timedelta(milliseconds=1)
"""How long a failed group asks each of its other transfers what became of it."""


class _Line(NamedTuple):
    """One transfer of a bound group."""

    peer: int
    place: int
    """Of the peer among the members, which is what Gloo calls its rank."""
    data: list[Tensor]
    sends: bool
    number: count[int]
    """Counts the transfers of its direction and pair; shared by all that are bound on it."""
    nbytes: int

    def tag(self) -> int:
        """The next transfer's tag: differs where the two ends differ in number or size."""
        return (next(self.number) * 0x9E3779B1 ^ self.nbytes) % NEVER

    def start(self, group: Any) -> Work:
        """Post it; no reference to `group` is kept, for the connections live as long as one."""
        post: Callable[[list[Tensor], int, int], Work] = group.send if self.sends else group.recv
        return post(self.data, self.place, self.tag())


class GlooTransport:
    """One rank of a group of processes; a `Transport` for CPU tensors.

    Connects to every other of `members` at construction, through `store`, which nobody used before; raises
    `TransportError` if one does not come.
    `host` is the address that this rank listens on, None for Gloo's own choice (``GLOO_SOCKET_IFNAME``).
    """

    kind = "gloo"
    capture = staticmethod(never)

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float = 300.0,
        host: str | None = None,
    ) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s
        self._sent = {peer: count() for peer in members}
        self._received = {peer: count() for peer in members}
        self._group: Any = self._connect(store, host)
        _OPEN.add(self)

    def _connect(self, store: Store, host: str | None) -> Any:
        limit = timedelta(seconds=self.timeout_s)
        place, ranks = self.members.index(self.rank), len(self.members)
        # Only without options does torch look at GLOO_SOCKET_IFNAME.
        options = _options(host, limit) if host else limit
        try:
            return call_store(lambda: ProcessGroupGloo(store, place, ranks, options), self.timeout_s + STORE_ANSWER_S)
        except (RuntimeError, TransportError) as error:
            raise TransportError(
                f"not all {ranks} ranks connected within {self.timeout_s:g} s: start all of them, with the same "
                "world size, and look at the output of those that are missing; between hosts, GLOO_SOCKET_IFNAME names "
                "the network card",
                Place(self.rank),
            ) from error

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`: ordinary memory."""
        require_cpu(device, MEDIUM)
        return zeros(numel, dtype, device)

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`."""
        begin = self.bind_halves(group)

        def exchange(moment: Moment) -> None:
            begin(moment)()

        return exchange

    def bind_halves(self, group: Group) -> Callable[[Moment], Finish]:
        """As `bind`, but what begins the transfers returns at once, with what waits until they have happened."""
        rest, copies = split_self(group, self.rank, self.members)
        lines = self._lines(rest)

        def begin(moment: Moment) -> Finish:
            group = self._group
            if group is None:
                raise TransportClosed("the transport was closed", Place(self.rank, None, *moment, rest.hop))
            for source, target in copies:
                target.copy_(source)
            return self._begun(group, lines, moment, rest.hop)

        return begin

    def _lines(self, group: Group) -> list[_Line]:
        if self._group is None:
            raise TransportClosed("the transport was closed", Place(self.rank, hop=group.hop))
        for parcel in (*group.sends, *group.recvs):
            require_cpu(parcel.data.device, MEDIUM)
        lines = [self._line(parcel, False, self._received) for parcel in group.recvs]
        return lines + [self._line(parcel, True, self._sent) for parcel in group.sends]

    def _line(self, parcel: Parcel, sends: bool, numbers: Mapping[int, count[int]]) -> _Line:
        peer, data = parcel
        return _Line(peer, self.members.index(peer), [data], sends, numbers[peer], data.nbytes)

    def _begun(self, group: Any, lines: list[_Line], moment: Moment, hop: int) -> Finish:
        works: list[Work] = []
        deadline = monotonic() + self.timeout_s

        def finish() -> None:
            try:
                for work in works:
                    work.wait(timedelta(seconds=max(deadline - monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._explained(error, lines, works, moment, hop) from error

        try:
            works.extend(line.start(group) for line in lines)
        except RuntimeError as error:
            raise self._explained(error, lines, works, moment, hop) from error
        return finish

    def _explained(
        self, error: RuntimeError, lines: list[_Line], works: list[Work], moment: Moment, hop: int
    ) -> TransportError:
        """The error that names the peer: a broken connection before a late answer, whichever came first."""
        unfinished = [(line, state) for line, work in zip(lines, works, strict=False) if (state := _state(work))]
        if len(works) < len(lines):  # the error came from starting the next one
            unfinished.append((lines[len(works)], error))
        broken = [pair for pair in unfinished if not _is_late(pair[1])]
        line, state = (broken or unfinished or [(lines[0], error)])[0]
        place = Place(self.rank, line.peer, moment.step, moment.bucket, hop, line.nbytes)
        if self._group is None:
            return TransportClosed("this rank gave the transport up during the transfer", place)
        if not _is_late(state):
            return PeerLost("the connection to the peer broke: its process ended; look at its own output", place)
        peers = sorted({line.peer for line, _ in unfinished})
        what = f"no answer from ranks {peers} within {self.timeout_s:g} s: slow, stopped, or running another program"
        return DeadlineExceeded(what, place)

    def close(self) -> None:
        """Drop the connections, whoever holds references; peers that still wait for this rank see them break.

        Gloo's own ``abort`` and ``shutdown`` leave the sockets open (tried with torch 2.13); a receive that
        times out closes them all. A line that is broken already refuses even that, so every peer is tried.
        """
        group, self._group = self._group, None
        for place, peer in enumerate(self.members if group is not None else ()):
            if peer != self.rank:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1, device=CPU)], place, NEVER).wait(POLL)

    abort = close

    def leave_to_parent(self) -> None:
        """In a forked child: touch the connections no more, not even to free them.

        Gloo's threads do not exist there, and its destructor waits for them (tried with torch 2.13); what it closes
        it would first take out of the epoll set that it shares with the parent.
        """
        group, self._group = self._group, None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_OPEN: WeakSet[GlooTransport] = WeakSet()


def _after_fork() -> None:
    for transport in tuple(_OPEN):
        transport.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _options(host: str, limit: timedelta) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # torch's stub is behind
    options._timeout = limit  # noqa: SLF001
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    return options


def _state(work: Work) -> RuntimeError | None:
    """None if the transfer happened, else why not."""
    try:
        work.wait(POLL)
    except RuntimeError as error:
        return error
    return None


def _is_late(error: RuntimeError) -> bool:
    """After one transfer has timed out, Gloo closes all lines and says so in other words."""
    return "Timed out" in str(error) or "Application timeout" in str(error)
