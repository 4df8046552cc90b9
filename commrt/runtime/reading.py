# SPDX-License-Identifier: Apache-2.0
"""Binds what a rank does on a window: it reads what peers of its host send where it lies.

A window is a buffer that these peers map. The rank signals to them, and waits for them, before and
after it reads. For `PeersTransport`, on GPUs. No transfer needs a receive buffer, and a sum of
peers is one pass over their memory. What ranks of other hosts send is received as in
`commrt.runtime.executor`, within the same hop; sums have the same bits as there. `bind_reading`
binds a whole program, `bind_receiving` a group of messages without a schedule. Both are for the
communication thread, or the caller's in its place, as is what they return. It writes the rank's own
buffer and scratch, and only reads the peers' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from torch import Tensor

from commrt.kernels.dispatch import copying
from commrt.kernels.layout import padded
from commrt.kernels.packing import Parts
from commrt.program import Hop, Program, Transfer
from commrt.runtime.executor import (
    Binder,
    BoundHop,
    BoundProgram,
    Combination,
    Scratch,
    combinations_of,
    facts_of,
)
from commrt.schedule import COPY
from commrt.signal_waits import SignalWait, signal_waits
from commrt.transport.protocol import Exchange, P2PGroup, Tag, Transport, Window


def bind_reading(
    program: Program,
    buffer: Tensor,
    window: Window,
    transport: Transport,
    *,
    bounds: Sequence[int] | None = None,
    copied: int | None = None,
    scratch: Scratch | None = None,
) -> BoundProgram:
    """Bind `program` to `buffer` [numel], which `window` shows to the peers of this host.

    The peers' programs must be bound in the same way. `bounds` are those of `bind`. As there, the
    buffer may change as soon as the program has run. What comes from other hosts, and hops that
    overwrite what they send, need scratch memory, which programs that never run at once may share;
    None allocates it.

    With `copied` the last hop leaves what it would copy in the peers' memory, but for the first
    `copied` elements: see `BoundProgram.peer_parts`. Then `BoundProgram.finish` ends the program.
    """
    shared = Scratch() if scratch is None else scratch
    reader = _Reader(program, buffer, transport, bounds, window, copied, shared)
    hops = [bound for number, hop in reader.hops() for bound in reader.bind(number, hop)]
    group = reader.all_messages()
    end = reader.end()
    if not reader.peer_parts:
        return BoundProgram((*hops, end), reader.nbytes_sent, group, None)
    return BoundProgram(
        tuple(hops), reader.nbytes_sent, group, None, (), Parts(tuple(reader.peer_parts)), end
    )


def bind_receiving(group: P2PGroup, window: Window, transport: Transport) -> Exchange:
    """Bind `group`: each message sends all of the buffer of `window`, or receives that of a peer.

    Receives are copied from peers of this host, and the transport moves the other messages.
    """
    local, remote = group.split(window.peers)
    if not (ranks := sorted(local.peers)):
        return transport.bind(group)
    # positions of a program of one hop (`SignalWait`): 1 ready, 2 has been read, 3 the end
    ready = window.bind(
        SignalWait(1, {message.peer: 1 for message in local.recvs}), group.hop, ranks, first=True
    )
    copies = [copying(message.data, window.peers[message.peer]) for message in local.recvs]
    done = window.bind(
        SignalWait(3, {message.peer: 2 for message in local.sends}), group.hop, ranks, last=True
    )
    rest = transport.bind(remote)

    def run(tag: Tag) -> None:
        ready(tag)
        for copy in copies:
            copy()
        done(tag)
        rest(tag)

    return run


class _Reader(Binder):
    """A program while its hops are bound: `bind` each once, in order, and `end` after them."""

    def __init__(
        self,
        program: Program,
        buffer: Tensor,
        transport: Transport,
        bounds: Sequence[int] | None,
        window: Window,
        copied: int | None,
        scratch: Scratch,
    ) -> None:
        super().__init__(program, buffer, transport, bounds)
        self._window = window
        self._copied = buffer.numel() if copied is None else copied
        self._last_hop = max((number for number, _ in self.hops()), default=-1)
        self._end_number = len(program.hops)  # of what follows all hops
        self._local_peers = sorted(program.peers & set(window.peers))
        self._has_remote_peers = len(self._local_peers) < len(program.peers)
        self._signal_waits = signal_waits(program.hops, program.chunks, self._local_peers)
        self._is_first = True  # until `_exchange` has bound the program's first signal
        self._scratch = scratch.row(self._scratch_numel(), buffer.dtype, buffer.device)
        self.peer_parts: list[tuple[Tensor, int, int]] = []
        """Parts of the buffer that stay in peers' memory; hops add to it as they are bound."""

    def bind(self, number: int, hop: Hop) -> list[BoundHop]:
        """Return the hop as one, or as two if it must not write before all peers have read."""
        before = cast("SignalWait", self._signal_waits.before[number])  # None of idle hops only
        within = self._signal_waits.within[number]
        places = self.places(hop, self._scratch, partial(self._place, number))
        group = self.group(number, hop, places)
        _, remote = group.split(self._local_peers)
        exchange = self._exchange(before, number, remote)
        moves = self._moves(hop, places, lands=number == self._last_hop and within is None)
        if within is None:
            return [BoundHop(exchange, moves, number, None, facts_of(group))]
        stages = tuple(
            copying(place, self._in_peer(each))
            for each, place in zip(hop.recvs, places, strict=True)
            if each.peer in self._local_peers
        )
        return [
            BoundHop(exchange, stages, number, None, facts_of(group)),
            self._wait(within, number, moves),
        ]

    def all_messages(self) -> P2PGroup:
        """Return what a transport exchanges: messages with other hosts; or all, if all are read."""
        _, remote = P2PGroup(self.sends, self.recvs).split(self._local_peers)
        return remote if self._has_remote_peers else P2PGroup(self.sends, self.recvs, reads=True)

    def end(self) -> BoundHop:
        """Return the last signal and wait, after which no peer reads the buffer."""
        return self._wait(self._signal_waits.end, self._end_number, ())

    def _wait(
        self, signal_wait: SignalWait, number: int, moves: tuple[Combination, ...]
    ) -> BoundHop:
        """Return a hop without messages: `signal_wait`, then `moves`."""
        nothing = P2PGroup([], [], number)
        return BoundHop(
            self._exchange(signal_wait, number, nothing), moves, number, None, facts_of(nothing)
        )

    def _exchange(self, signal_wait: SignalWait, number: int, remote: P2PGroup) -> Exchange:
        """Bind `signal_wait`, then the messages with other hosts."""
        first = self._is_first
        self._is_first = False
        last = number == self._end_number
        wait = self._window.bind(
            signal_wait,
            number,
            self._local_peers,
            first=first,
            last=last,
            checks_abort=self._has_remote_peers,
        )
        if not remote.peers:
            return wait
        exchange = self.transport.bind(remote)

        def both(tag: Tag) -> None:
            wait(tag)
            exchange(tag)

        return both

    def _in_peer(self, transfer: Transfer) -> Tensor:
        return self._window.peers[transfer.peer][
            self.bounds[transfer.lo] : self.bounds[transfer.hi]
        ]

    def _scratch_numel(self) -> int:
        needs = (
            sum(
                padded(self.own(each).numel())
                for each in hop.recvs
                if self._is_staged(each, number)
            )
            for number, hop in self.hops()
        )
        return max(needs, default=0)

    def _is_staged(self, transfer: Transfer, number: int) -> bool:
        """Return True for a receive that goes to scratch: it neither stays nor lands in place."""
        is_remote_sum = transfer.peer not in self._local_peers and transfer.combine != COPY
        return is_remote_sum or self._signal_waits.within[number] is not None

    def _place(self, number: int, each: Transfer) -> Tensor | None:
        """Return where a receive is read: peer's memory, its final place, or None for scratch."""
        if self._is_staged(each, number):
            return None
        return self._in_peer(each) if each.peer in self._local_peers else self.own(each)

    def _moves(self, hop: Hop, places: Sequence[Tensor], *, lands: bool) -> tuple[Combination, ...]:
        """Return what copies and combines receives at `places`.

        `lands`: no later hop reads the copies. `peer_parts` then notes those that stay with peers.
        """
        copies = []
        for each, place in zip(hop.recvs, places, strict=True):
            own = self.own(each)
            begin = self.bounds[each.lo]
            if each.combine != COPY or not own.numel() or own.data_ptr() == place.data_ptr():
                continue
            here = min(max(self._copied - begin, 0), own.numel()) if lands else own.numel()
            if here:
                copies.append(copying(own[:here], place[:here]))
            if here < own.numel():
                self.peer_parts.append((place[here:], begin + here, begin + own.numel()))
        return (*copies, *combinations_of(hop, self.program.rank, places, self.own))
