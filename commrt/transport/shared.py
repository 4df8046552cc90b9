# SPDX-License-Identifier: Apache-2.0
"""Shared memory between the processes of one Linux host: one copy at most.

A sender offers its data where it lies. The receiver copies or reads it, and acknowledges that, so a
send waits for its receive, as on NCCL. Sends from `SharedTransport.allocate` need no other copy;
other memory is first copied to a shared segment. Offers and small messages meet in memory
(`commrt.transport.channel`); small ones are complete when they are sent.

The thread that exchanges, or later closes, runs all of it, but `allocate`, `timeout_s` and `abort`
(any thread), and `leave_to_parent` (a forked child).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import (
    DeadlineExceeded,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
)
from commrt.store.client import call_store
from commrt.store.parsing import MALFORMED
from commrt.threads.deadline import clock
from commrt.threads.forking import release_in_forked_child
from commrt.transport.arena import Arena, aligned
from commrt.transport.bind_checks import require_cpu, split_self
from commrt.transport.channel import OFFER, SMALL_NBYTES, Channel, Packet
from commrt.transport.local_sockets import connect
from commrt.transport.packet_wait import PacketWait
from commrt.transport.peer_exchange import PeerExchange, Where
from commrt.transport.protocol import (
    CPU,
    EndLoan,
    Exchange,
    P2PGroup,
    P2PMessage,
    Tag,
    Transport,
)


class SharedTransport(Transport):
    """One rank of a group of processes on one host; a `Transport` for CPU tensors.

    Connects to all other `members` through a `store` that nobody else uses; raises
    `DeadlineExceeded` with the ranks that do not come. All ranks must have the same
    `commrt.store.addresses.host_identity`. Other arguments of a `HostTransport` do not matter here.
    """

    kind = "shared"
    one_host = True

    def __init__(
        self, store: Store, rank: int, members: Sequence[int], timeout_s: float = 300.0, *_: object
    ) -> None:
        self.rank = rank
        self.members = members
        self.timeout_s = timeout_s
        self._arena = Arena()
        self._staging = torch.empty(0, dtype=torch.uint8, device=CPU)
        """Where sends from other memory are copied; `bind` makes it larger."""
        self._failure: TransportError | None = None
        """Of the exchange that failed, after which no other begins."""
        self._closed = False
        """Set by `abort`, on any thread, before the connections end."""
        self._wait = PacketWait(len(members))
        ends = call_store(lambda: connect(store, rank, members, timeout_s), timeout_s, rank)
        self._channels = {peer: Channel(end) for peer, end in ends.items()}
        release_in_forked_child(self)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """Return zeros [numel] in memory from which sends need no copy on this side."""
        require_cpu(device)
        # it travels in packets: a group may need no files for a segment
        if numel * dtype.itemsize <= SMALL_NBYTES:
            return super().allocate(numel, dtype)
        return self._allocate_in_arena(numel, dtype)

    def _allocate_in_arena(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return self._arena.allocate(numel, dtype)
        except OSError as error:
            raise TransportError(
                f"this rank has no shared memory for a buffer ({error}): is there a limit on"
                " memory, on open files or on the size of files (`ulimit -v`, `-n`, `-f`, or the"
                " container's)",
                Place(self.rank, nbytes=numel * dtype.itemsize),
            ) from error

    def bind(self, group: P2PGroup) -> Exchange:
        rest, copies = split_self(group, self.rank, self.members)
        memory, staged = self._stage(rest.sends)
        copies += staged
        exchanges = {each.channel.fd: each for each in self._exchanges(rest, memory)}

        def run(tag: Tag) -> EndLoan | None:
            where = partial(tag.place, self.rank, rest.hop)
            self._require_open(where)
            for source, target in copies:
                target.copy_(source)
            if not exchanges:
                return None
            self._run(exchanges, where, methodcaller("begin", tag.call))
            if not group.reads:
                return None
            return partial(self._run, exchanges, where, PeerExchange.return_borrowed)

        return run

    def _stage(
        self, sends: Sequence[P2PMessage]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return where peers find each of `sends`, and (source, target) pairs to copy there first.

        All groups share one staging buffer: they run one at a time, and end when every offer was
        copied. If it is too small for this group, a larger one takes its place.
        """
        large = [m.data for m in sends if m.data.nbytes > SMALL_NBYTES]
        outside = {id(data): data for data in large if self._arena.find(data) is None}
        need = sum(aligned(data.nbytes) for data in outside.values())
        if need > len(self._staging):
            self._staging = self._allocate_in_arena(max(need, 2 * len(self._staging)), torch.uint8)
        slots = {}
        at = 0
        for key, data in outside.items():
            slots[key] = self._staging[at : at + data.nbytes]
            at += aligned(data.nbytes)
        copies = [(_on_cpu(data), slots[key].view(data.dtype)) for key, data in outside.items()]
        return [slots.get(id(m.data), m.data) for m in sends], copies

    def _exchanges(self, group: P2PGroup, memory: Sequence[Tensor]) -> Iterator[PeerExchange]:
        for peer in dict.fromkeys(m.peer for m in (*group.sends, *group.recvs)):
            packets = [
                self._packet(data)
                for data, m in zip(memory, group.sends, strict=True)
                if m.peer == peer
            ]
            targets = [_on_cpu(m.data) for m in group.recvs if m.peer == peer]
            originals = [target.detach() for target in targets] if group.reads else None
            yield PeerExchange(peer, self._channels[peer], packets, targets, originals)

    def _packet(self, data: Tensor) -> Packet:
        """Return the small message `data`, or an offer of it from the segment that it lies in."""
        found = None if data.nbytes <= SMALL_NBYTES else self._arena.find(data)
        if found is None:
            return Packet(_on_cpu(data).view(torch.uint8).numpy().data)
        segment, offset = found
        return Packet(OFFER.pack(segment.number, offset, data.nbytes), segment, data.nbytes)

    def _require_open(self, where: Where) -> None:
        if self._closed:
            raise TransportClosed("the transport was closed", where())
        if self._failure is not None:
            raise TransportClosed(
                "an earlier exchange failed; start a new world", where()
            ) from self._failure

    def _run(
        self,
        exchanges: Mapping[int, PeerExchange],
        where: Where,
        start: Callable[[PeerExchange], None],
    ) -> None:
        """Call `start` with each of `exchanges`, by descriptor; return when all are complete."""
        try:
            while self._arena.freed:
                number = self._arena.freed.popleft()
                for channel in self._channels.values():
                    channel.unmap(number)
            for exchange in exchanges.values():
                start(exchange)
            self._complete(exchanges, where)
        except TransportError as failure:
            self._failure = failure
            raise

    def _complete(self, exchanges: Mapping[int, PeerExchange], where: Where) -> None:
        """Serve each peer that has sent something, until all of `exchanges` are complete."""
        deadline = clock.now_s() + self.timeout_s
        waiting = dict(exchanges)
        ready = list(waiting)  # packets may be here already
        has_slept = False
        while True:
            for fd in ready:
                exchange = waiting[fd]
                channel = exchange.channel
                try:
                    if has_slept:  # what woke it lies on the socket
                        channel.read_socket()
                    is_complete = exchange.progress(where)
                except (OSError, *MALFORMED) as error:
                    raise self._ended(exchange.place(where), error) from error
                if is_complete:  # though the peer may be gone: its last small messages were here
                    del waiting[fd]
                elif not channel.is_open:
                    raise self._ended(exchange.place(where))
            if not waiting:
                return
            ready = self._wait.look(waiting)
            has_slept = not ready
            if has_slept:
                ready = self._wait.sleep(waiting, deadline - clock.now_s())
            if not ready and clock.now_s() > deadline:
                late = sorted(waiting.values(), key=lambda exchange: exchange.peer)
                what = (
                    "timed out: no answer from ranks"
                    f" {[exchange.peer for exchange in late]} within {self.timeout_s:g} s"
                )
                raise DeadlineExceeded(
                    f"{what}: slow, stopped, or running another program", late[0].place(where)
                )

    def _ended(self, place: Place, error: Exception | None = None) -> TransportError:
        """Return why the exchange at `place` ended: by `error`, or else by the peer's end."""
        if self._closed:
            return TransportClosed("the transport was closed", place)
        if isinstance(error, OSError):
            what = (
                f"the peer's memory cannot be used here ({error}): is there a limit on open files"
                " or on memory"
            )
            return TransportError(what, place)
        if error is not None:
            what = (
                "the peer sent a malformed packet: start all ranks with the same version of commrt"
            )
            return TransportError(what, place)
        what = "the peer is gone: its process ended or gave up; look at its own output"
        return PeerLost(what, place)

    def close(self) -> None:
        """End all connections; peers that wait raise `PeerLost` at once. Allocated memory stays."""
        self.abort()
        for channel in self._channels.values():
            channel.release()
        self._arena = Arena()
        self._staging = torch.empty(0, dtype=torch.uint8, device=CPU)

    def abort(self) -> None:
        """End all connections, on any thread; memory of a running group stays until `close`."""
        self._closed = True
        for channel in self._channels.values():
            channel.shut_down()

    def leave_to_parent(self) -> None:
        """Release a forked child's sockets, so that the parent's end still ends the connections."""
        self._closed = True
        for channel in self._channels.values():
            channel.release()


def _on_cpu(data: Tensor) -> Tensor:
    require_cpu(data.device)
    # the very tensor, which may be set to other memory
    return data.detach() if data.requires_grad else data
