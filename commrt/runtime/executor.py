# SPDX-License-Identifier: Apache-2.0
"""A rank's program on a buffer: bound once to addresses, then run with as little Python as possible.

What a rank copies is received in its final place. What it combines with its own data is received in scratch memory and
combined after the exchange, so a rank may send a chunk and add to it in the same hop. If it does not, a transport of
one host may let it read the senders' memory instead of copying it to scratch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

from torch import Tensor

from commrt.kernels.dispatch import adding, mixing
from commrt.kernels.layout import GRANULE, padded
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.program import Dependencies, Hop, Program, Transfer, chunk_bounds, dependencies, final_receives
from commrt.schedule import ADD, COPY, Combine
from commrt.threads.future import StreamEvent, Streams
from commrt.threads.recording import Recorder, within_range
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

Combination = Callable[[], object]
Adding = Callable[[Tensor, Sequence[Tensor]], Combination]
"""(own, summands) -> a function that combines all from left to right into `own`, one of them, at each call."""


@dataclass(frozen=True, slots=True)
class BoundHop:
    """One hop of a program, with the memory of all its transfers."""

    exchange: Exchange
    combinations: tuple[Combination, ...]
    number: int
    """The step of the schedule."""
    after: int | None
    """The latest hop whose combinations must be done before this exchange; None if there is none."""
    facts: dict[str, int | str]


class RunnableProgram(Protocol):
    """A program that is bound to memory, whatever travels in place of its values."""

    @property
    def nbytes_sent(self) -> int:
        """Bytes that this rank sends in one run."""

    @property
    def elsewhere(self) -> Parts:
        """Parts of the buffer that are in peers' memory after `run`, where they may be read until `finish`."""

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread."""

    def finish(self, tag: Tag) -> None:
        """Tell peers that this rank has read what is `elsewhere`."""


class Landing(NamedTuple):
    """A receive into elements [begin, end) that no later hop uses: on a CPU `target` may be set to other memory."""

    target: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program on one buffer."""

    hops: tuple[BoundHop, ...]
    nbytes_sent: int
    group: P2PGroup
    streams: Streams | None
    """The streams to combine on while the next exchange runs; None to do one after the other."""
    landings: Sequence[Landing] = ()
    elsewhere: Parts = NO_PARTS
    """Parts of the buffer that are in peers' memory after `run`, where they may be read until `finish`."""
    end: BoundHop | None = None
    """What `run` leaves to `finish`, if there are such parts."""

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread. Raises `TransportError` and leaves the buffer half done."""
        if self.streams is not None or recorder is not None:
            self._run_on_streams(tag, self.streams or Streams(), recorder)
            return
        for hop in self.hops:
            return_borrowed = hop.exchange(tag)
            for combine in hop.combinations:
                combine()
            if return_borrowed is not None:
                return_borrowed()

    def finish(self, tag: Tag) -> None:
        """Tell peers that this rank has read what is `elsewhere`; does nothing if nothing is."""
        if self.end is not None:
            self.end.exchange(tag)

    def _run_on_streams(self, tag: Tag, streams: Streams, recorder: Recorder | None) -> None:
        combined: dict[int, StreamEvent] = {}
        for hop in self.hops:
            if hop.after in combined:
                streams.wait_event(combined[hop.after])
            with within_range(recorder, "hop", **hop.facts):
                return_borrowed = hop.exchange(tag)
            if hop.combinations:
                received = streams.record_event()
                with streams.side_stream(), within_range(recorder, "combine"):
                    streams.wait_event(received)
                    for combine in hop.combinations:
                        combine()
                    combined[hop.number] = streams.record_event()
            if return_borrowed is not None:  # of host memory, where no stream queues work
                return_borrowed()
        for last in list(combined.values())[-1:]:
            streams.wait_event(last)


def bind(
    program: Program,
    buffer: Tensor,
    transport: Transport,
    scratch: Tensor | None = None,
    streams: Streams | None = None,
    *,
    bounds: Sequence[int] | None = None,
    add: Adding | None = None,
) -> BoundProgram:
    """Bind `program` to `buffer`, a contiguous row [numel], cut into the program's chunks at `bounds` [chunks + 1].

    Without `bounds` the cut is that of `chunk_bounds`. `add` makes the functions that do what ADD stands for (default:
    sums). Programs that never run at the same time may share `scratch` [>= scratch_numel], of the buffer's dtype; None
    allocates it. On `streams` that queue work, a hop's combinations run beside the next exchange if the two touch
    different chunks.
    """
    if bounds is None:  # cut so that 16-byte accesses stay aligned in every dtype
        bounds = chunk_bounds(buffer.numel(), program.chunks, GRANULE)
    waits = dependencies(program.hops, program.chunks)
    half, other_half = _halves(program, bounds, waits)
    if scratch is None:
        scratch = buffer.new_empty(half + other_half)
    binder = _Binder(program.rank, buffer, scratch, bounds, transport, half, add or adding)
    final = final_receives(program.hops, program.chunks)
    hops = tuple(
        binder.hop(number, hop, waits, final[number]) for number, hop in enumerate(program.hops) if not hop.idle
    )
    nbytes = sum(message.data.nbytes for message in binder.sends)
    beside = streams if streams is not None and streams.queues and waits.overlap else None
    return BoundProgram(hops, nbytes, P2PGroup(binder.sends, binder.recvs), beside, tuple(binder.landings))


def scratch_numel(program: Program, numel: int, bounds: Sequence[int] | None = None) -> int:
    """Return the elements of scratch that `program` needs on a buffer of `numel` elements, cut as for `bind`."""
    cut = chunk_bounds(numel, program.chunks, GRANULE) if bounds is None else bounds
    return sum(_halves(program, cut, dependencies(program.hops, program.chunks)))


def _halves(program: Program, bounds: Sequence[int], waits: Dependencies) -> tuple[int, int]:
    """Return the elements of scratch for even and odd hops; (all, 0) if every hop waits for the one before it."""
    sizes = [[0], [0]]
    for hop, parity in zip(program.hops, waits.parity, strict=True):
        sizes[parity * waits.overlap].append(
            sum(padded(bounds[transfer.hi] - bounds[transfer.lo]) for transfer in hop.combined)
        )
    return max(sizes[0]), max(sizes[1])


@dataclass(frozen=True, slots=True)
class _Binder:
    rank: int
    buffer: Tensor
    scratch: Tensor
    bounds: Sequence[int]
    transport: Transport
    half: int
    """Where the scratch of odd hops begins."""
    add: Adding
    sends: list[P2PMessage] = field(default_factory=list)
    recvs: list[P2PMessage] = field(default_factory=list)
    """What all hops bound so far exchange."""
    landings: list[Landing] = field(default_factory=list)

    def hop(self, number: int, hop: Hop, waits: Dependencies, final: Sequence[bool]) -> BoundHop:
        places = self._receive_places(hop, self.half * waits.parity[number] * waits.overlap)
        sends = [P2PMessage(transfer.peer, self._own(transfer), transfer.group) for transfer in hop.sends]
        recvs = [
            P2PMessage(transfer.peer, place, transfer.group) for transfer, place in zip(hop.recvs, places, strict=True)
        ]
        self.sends.extend(sends)
        self.recvs.extend(recvs)
        ends = zip(hop.recvs, places, final, strict=True)
        self.landings.extend(Landing(place, self.bounds[t.lo], self.bounds[t.hi]) for t, place, ok in ends if ok)
        exchange = self.transport.bind(P2PGroup(sends, recvs, number, only_reads(hop)))
        combinations = tuple(combinations_of(hop, self.rank, places, self._own, self.add))
        return BoundHop(exchange, combinations, number, waits.after[number], facts_of(number, sends, recvs))

    def _own(self, transfer: Transfer) -> Tensor:
        return self.buffer[self.bounds[transfer.lo] : self.bounds[transfer.hi]]

    def _receive_places(self, hop: Hop, used: int) -> list[Tensor]:
        """Return the memory of each receive: its final place, or the next piece of scratch after `used` elements."""
        places = []
        for transfer in hop.recvs:
            own = self._own(transfer)
            places.append(own if transfer.combine == COPY else self.scratch[used : used + own.numel()])
            used += 0 if transfer.combine == COPY else padded(own.numel())
        return places


def combinations_of(
    hop: Hop, rank: int, places: Sequence[Tensor], own_of: Callable[[Transfer], Tensor], add: Adding = adding
) -> Iterator[Combination]:
    """Yield what combines the receives of `hop`, which lie at `places`, with ``own_of(receive)``, range by range.

    One kernel adds all that comes for one range, in order of ranks: `rank`'s own value is added in its place.
    """
    ranges = defaultdict[tuple[int, int, Combine], list[tuple[Transfer, Tensor]]](list)  # each by sender
    for each, place in zip(hop.recvs, places, strict=True):
        if each.combine != COPY:
            ranges[each.lo, each.hi, each.combine].append((each, place))
    for (_, _, combine), run in sorted(ranges.items(), key=itemgetter(0)):
        legs, received = zip(*run, strict=True)
        own = own_of(legs[0])
        if not own.numel():
            continue
        if combine == ADD:
            before = sum(leg.peer < rank for leg in legs)
            yield add(own, (*received[:before], own, *received[before:]))
        else:
            yield from (mixing(own, place, leg.weight) for leg, place in zip(legs, received, strict=True))


def only_reads(hop: Hop) -> bool:
    """Return True if no peer reads what combining changes: then senders may lend their memory until the hop ends."""
    apart = all(sent.hi <= own.lo or own.hi <= sent.lo for sent in hop.sends for own in hop.combined)
    return apart and len(hop.combined) == len(hop.recvs)


def facts_of(number: int, sends: Sequence[P2PMessage], recvs: Sequence[P2PMessage]) -> dict[str, int | str]:
    """Return what a trace says of a hop."""
    to, source = (", ".join(str(peer) for peer in sorted({p.peer for p in side})) for side in (sends, recvs))
    return {"number": number, "to": to, "from": source, "nbytes": sum(message.data.nbytes for message in sends)}
