# SPDX-License-Identifier: Apache-2.0
"""Shared memory between the processes of one Linux host: one copy, from the sender's memory to the receiver's.

A sender tells where its data lies, the receiver copies it from there and says so: a rendezvous, as on NCCL.
Memory from `SharedTransport.allocate` is offered where it is; what lies elsewhere is first copied to memory that
is. Words travel on sockets (`links`), so a process that ends is noticed at once, by whatever it ends.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic
from weakref import WeakSet, finalize

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, SizeMismatch, TransportClosed, TransportError
from commrt.membership.store_client import MALFORMED, STORE_ANSWER_S, call_store
from commrt.transport.links import Link, Offer, packets
from commrt.transport.meeting import meet
from commrt.transport.protocol import CPU, Exchange, Group, Moment, Parcel, never, require_cpu, split_self
from commrt.transport.segments import Arena, Segment, aligned

__all__ = ["SharedTransport"]

MEDIUM = "shared memory"


@dataclass(slots=True, eq=False)
class _Deal:
    """All that a bound group does with one peer, in the order agreed with it."""

    peer: int
    link: Link
    sends: Sequence[Offer]
    said: Sequence[bytes]
    """The sends as packets."""
    segments: frozenset[Segment]
    """What the sends lie in."""
    targets: Sequence[Tensor]
    """Where the receives go."""
    received: int = 0
    """How many receives of the running exchange have happened."""

    @property
    def finished(self) -> bool:
        """True if nothing is left to say or to hear."""
        return self.received == len(self.targets) and not self.link.untaken and not self.link.full

    def begin(self) -> None:
        """Make our offers."""
        self.received = 0
        self.link.show(self.segments)
        self.link.offer(self.said, len(self.sends))

    @property
    def awaited(self) -> int:
        """What to poll the link for."""
        return select.POLLIN | select.POLLOUT if self.link.full else select.POLLIN

    def hear(self) -> bool:
        """Read what the peer said and do what can be done now; False if it will say nothing more."""
        self.link.flush()
        speaks = self.link.listen()
        self._take()
        return speaks

    def _take(self) -> None:
        """Take all that is offered and fits; what does not fit is refused and stays."""
        before, offers = self.received, self.link.offers
        while offers and self.received < len(self.targets):
            target = self.targets[self.received]
            if offers[0].nbytes != target.nbytes:
                self.link.refuse(target.nbytes)
                break
            target.copy_(self.link.source(offers.popleft(), target.dtype))
            self.received += 1
        if self.received > before:
            self.link.took(self.received - before)

    def quarrel(self) -> str | None:
        """What the two ends differ on, if they do."""
        if self.link.expected_nbytes is not None:
            return f"this rank sends {self._untaken[0].nbytes} bytes and the peer expects {self.link.expected_nbytes}"
        if self.link.offers and self.received < len(self.targets):
            return f"the peer sends {self.link.offers[0].nbytes} bytes and this rank expects {self.nbytes}"
        return None

    @property
    def _untaken(self) -> Sequence[Offer]:
        return self.sends[len(self.sends) - self.link.untaken :]

    @property
    def nbytes(self) -> int:
        """The size of the first transfer that has not happened."""
        sizes = [target.nbytes for target in self.targets[self.received :]]
        sizes += [offer.nbytes for offer in self._untaken]
        return sizes[0] if sizes else 0


WhereOf = Callable[[_Deal], Place]
"""What an error says of a deal."""


class SharedTransport:
    """One rank of a group of processes on one host; a `Transport` for CPU tensors.

    Meets every other of `members` at construction, through `store`, which nobody used before; raises
    `DeadlineExceeded` with those that do not come.
    All ranks must give the same `commrt.transport.meeting.host_identity`. Used by one thread at a time; a process may
    hold several.
    """

    kind = "shared"
    capture = staticmethod(never)

    def __init__(self, store: Store, rank: int, members: Sequence[int], timeout_s: float = 300.0) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s
        self._arena = Arena()
        self._staging = torch.empty(0, dtype=torch.uint8, device=CPU)
        self._failure: TransportError | None = None
        self._closed = False
        ends = call_store(lambda: meet(store, rank, self.members, timeout_s), timeout_s + STORE_ANSWER_S, rank)
        self._links = {peer: Link(end) for peer, end in ends.items()}
        _OPEN.add(self)
        finalize(self, _close, tuple(self._links.values()))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """See `Transport.allocate`: sends from here need no copy on this side."""
        require_cpu(device, MEDIUM)
        return self._arena.allocate(numel, dtype)

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`."""
        rest, copies = split_self(group, self.rank, self.members)
        self._refuse_if_over(Place(self.rank, hop=rest.hop))
        memory, staged = self._offerable(rest.sends)
        deals, copies = list(self._deals(rest, memory)), [*copies, *staged]

        def exchange(moment: Moment) -> None:
            self._refuse_if_over(Place(self.rank, None, *moment, rest.hop))
            for source, target in copies:
                target.copy_(source)
            if deals:
                self._run(deals, moment, rest.hop)

        return exchange

    def _offerable(self, sends: Sequence[Parcel]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Where the peers find each of `sends`, and what must be copied there first."""
        outside = {id(p.data): p.data for p in sends if not self._arena.covers(p.data)}
        slots = dict(zip(outside, self._stage([data.nbytes for data in outside.values()]), strict=True))
        copies = [(_plain(data), slots[key].view(data.dtype)) for key, data in outside.items()]
        return [slots.get(id(p.data), p.data) for p in sends], copies

    def _stage(self, sizes: Sequence[int]) -> list[Tensor]:
        """Room for `sizes` bytes; shared by all exchanges, as they run one at a time and end when all was taken."""
        need = sum(map(aligned, sizes))
        if need > len(self._staging):
            self._staging = self._arena.allocate(max(need, 2 * len(self._staging)), torch.uint8)
        slots, at = [], 0
        for nbytes in sizes:
            slots.append(self._staging[at : at + nbytes])
            at += aligned(nbytes)
        return slots

    def _deals(self, group: Group, memory: Sequence[Tensor]) -> Iterator[_Deal]:
        for peer in dict.fromkeys(p.peer for p in (*group.sends, *group.recvs)):
            mine = [data for data, p in zip(memory, group.sends, strict=True) if p.peer == peer]
            places = [self._arena.locate(data) for data in mine]
            sends = [Offer(at[0].number, at[1], data.nbytes) for at, data in zip(places, mine, strict=True)]
            targets = [_plain(p.data) for p in group.recvs if p.peer == peer]
            segments = frozenset(segment for segment, _ in places)
            yield _Deal(peer, self._links[peer], sends, packets(sends), segments, targets)

    def _refuse_if_over(self, place: Place) -> None:
        if self._closed:
            raise TransportClosed("the transport was closed", place)
        if self._failure is not None:
            raise TransportClosed("an earlier exchange failed; start a new world", place) from self._failure

    def _run(self, deals: Sequence[_Deal], moment: Moment, hop: int) -> None:
        def place(deal: _Deal) -> Place:
            return Place(self.rank, deal.peer, *moment, hop, deal.nbytes)

        try:
            self._report_the_dead()
            for deal in deals:
                deal.begin()
            self._serve({deal.link.fd: deal for deal in deals}, place)
        except TransportError as failure:
            self._failure = failure
            raise

    def _report_the_dead(self) -> None:
        while self._arena.died:
            number = self._arena.died.popleft()
            for link in self._links.values():
                link.forget(number)

    def _serve(self, waiting: dict[int, _Deal], place: WhereOf) -> None:
        """Hear whoever has something to say, until every deal in `waiting` is finished and taken out of it."""
        deadline = monotonic() + self.timeout_s
        ready = list(waiting)  # words may be here already, and looking costs no more than polling
        while True:
            for fd in ready:
                self._hear(waiting[fd], place)
                if waiting[fd].finished:
                    del waiting[fd]
            if not waiting:
                return
            ready = _poll(waiting.values(), deadline - monotonic())
            if not ready and monotonic() > deadline:
                raise self._late(waiting.values(), place)

    def _hear(self, deal: _Deal, place: WhereOf) -> None:
        try:
            speaks = deal.hear()
        except OSError as error:
            self._refuse_if_over(place(deal))
            what = f"the peer's memory cannot be used here ({error}): is there a limit on open files or on memory"
            raise TransportError(what, place(deal)) from error
        except MALFORMED as error:
            what = (
                "the peer says what cannot be understood: is it of another version of commrt? Start all ranks with one"
            )
            raise TransportError(what, place(deal)) from error
        if quarrel := deal.quarrel():
            raise SizeMismatch(f"{quarrel}: the ranks run different programs", place(deal))
        if not speaks:
            self._refuse_if_over(place(deal))
            raise PeerLost("the peer is gone: its process ended or gave up; look at its own output", place(deal))

    def _late(self, waiting: Collection[_Deal], place: WhereOf) -> DeadlineExceeded:
        first, peers = min(waiting, key=_peer), sorted(map(_peer, waiting))
        what = f"no answer from ranks {peers} within {self.timeout_s:g} s: slow, stopped, or running another program"
        return DeadlineExceeded(what, place(first))

    def close(self) -> None:
        """End all conversations; peers that wait for this rank get `PeerLost` at once. Allocated memory stays."""
        self._closed = True
        _close(tuple(self._links.values()))
        self._arena.close()
        self._staging = torch.empty(0, dtype=torch.uint8, device=CPU)

    def abort(self) -> None:
        """As `close`, from any thread; what a running exchange uses is kept until `close`."""
        self._closed = True
        for link in self._links.values():
            link.hang_up()

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the sockets, so that the parent's death still ends them."""
        self._closed = True
        for link in self._links.values():
            link.drop()


_OPEN: WeakSet[SharedTransport] = WeakSet()


def _poll(waiting: Iterable[_Deal], left_s: float) -> list[int]:
    """The descriptors that became ready in `left_s` seconds, at the latest."""
    poller = select.poll()
    for deal in waiting:
        poller.register(deal.link.fd, deal.awaited)
    return [fd for fd, _ in poller.poll(ceil(left_s * 1000))] if left_s > 0 else []


def _peer(deal: _Deal) -> int:
    return deal.peer


def _close(links: Iterable[Link]) -> None:
    for link in links:
        link.close()


def _after_fork() -> None:
    for transport in tuple(_OPEN):
        transport.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _plain(data: Tensor) -> Tensor:
    require_cpu(data.device, MEDIUM)
    return data.detach()
