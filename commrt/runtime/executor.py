# SPDX-License-Identifier: Apache-2.0
"""A rank's program on a buffer, and the scratch memory that programs share: bound once, then run.

What a rank copies is received in its final place. What it combines with its own data is received in
scratch memory and combined after the exchange, so a rank may send a chunk and add to it in the same
hop. If it does not, a transport of one host may let it read the senders' memory instead of copying
it to scratch. A run is as little Python as possible. The communication thread binds and runs
programs, or the caller's in its place; they write the buffer and scratch, and know no world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.dependencies import Dependencies, dependencies, final_receives
from commrt.kernels.dispatch import adding, mixing
from commrt.kernels.layout import GRANULE, padded
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.program import Hop, Program, Transfer, chunk_bounds
from commrt.schedule import ADD, COPY, Combine, Schedule
from commrt.threads.recording import Recorder, within_range
from commrt.threads.streams import HOST, StreamEvent, Streams
from commrt.transport.protocol import (
    Allocate,
    Exchange,
    P2PGroup,
    P2PMessage,
    Tag,
    Transport,
    zeros,
)

Combination = Callable[[], object]
Adding = Callable[[Tensor, Sequence[Tensor]], Combination]
"""(own, summands) -> a function that combines all from left to right into `own`, one of them."""


@dataclass(frozen=True, slots=True)
class BoundHop:
    """One hop of a program, with the memory of all its transfers."""

    exchange: Exchange
    combinations: tuple[Combination, ...]
    number: int
    """The step of the schedule."""
    after: int | None
    """The latest hop whose combinations must be done before this exchange, or None."""
    facts: dict[str, int | str]
    """What a trace says of it."""


class RunnableProgram(ABC):
    """A program that is bound to memory, whatever travels in place of its values."""

    nbytes_sent: int
    """Bytes that this rank sends in one run."""
    peer_parts: Parts = NO_PARTS
    """Parts of the buffer in peers' memory after `run`, which may be read there until `finish`."""

    @abstractmethod
    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread.

        Raises `TransportError` and leaves the buffer half done.
        """

    def finish(self, tag: Tag) -> None:  # noqa: B027  # most leave no parts there
        """Tell peers that this rank has read `peer_parts`; does nothing if there are none."""


class Landing(NamedTuple):
    """A receive into [begin, end) that no later hop uses.

    On a CPU who bound the program may point `target` to other memory of that size between runs.
    """

    target: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class BoundProgram(RunnableProgram):
    """A program on one buffer."""

    hops: tuple[BoundHop, ...]
    nbytes_sent: int
    group: P2PGroup
    streams: Streams | None
    """The streams to combine on while the next exchange runs; None to do one after the other."""
    landings: Sequence[Landing] = ()
    peer_parts: Parts = NO_PARTS
    end: BoundHop | None = None
    """What `run` leaves to `finish`, if there are such parts."""

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """See `RunnableProgram.run`."""
        if self.streams is not None or recorder is not None:
            self._run_on_streams(tag, self.streams or HOST, recorder)
            return
        for hop in self.hops:
            return_borrowed = hop.exchange(tag)  # made by `Transport.bind`
            for combine in hop.combinations:
                combine()  # a summand may be in the sender's memory, until `return_borrowed`
            if return_borrowed is not None:
                return_borrowed()

    def finish(self, tag: Tag) -> None:
        """See `RunnableProgram.finish`."""
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


class Scratch(dict[tuple[str, torch.device], Tensor]):
    """Memory from `allocate`, by use and device, for programs that never run at once.

    It grows to what was needed. What is bound to memory that became too small for others keeps it.
    `row` writes here, on the thread that binds; its owner may `clear` it when no task runs.
    """

    def __init__(self, allocate: Allocate = zeros) -> None:
        super().__init__()
        self._allocate = allocate

    def row(self, numel: int, dtype: torch.dtype, device: torch.device, use: str = "") -> Tensor:
        """Return [numel] of the memory for this `use`, made anew if too small; contents are old."""
        nbytes = numel * dtype.itemsize
        if (use, device) not in self or len(self[use, device]) < nbytes:
            self[use, device] = self._allocate(nbytes, torch.uint8, device)
        return self[use, device][:nbytes].view(dtype)


def bind(
    program: Program,
    buffer: Tensor,
    transport: Transport,
    scratch: Scratch | None = None,
    streams: Streams | None = None,
    *,
    bounds: Sequence[int] | None = None,
    add: Adding | None = None,
) -> BoundProgram:
    """Bind `program` to `buffer`, a contiguous row [numel], cut at `bounds` [chunks + 1].

    Without `bounds` the cut is that of `chunk_bounds`. `add` makes the functions that do what ADD
    stands for (default: sums). Programs that never run at the same time may share `scratch`; None
    allocates it. On `streams` that queue work, a hop's combinations run beside the next exchange if
    the two touch different chunks.
    """
    binder = Binder(program, buffer, transport, bounds)
    waits = dependencies(program.hops, program.chunks)
    half, other_half = _halves(program, binder.bounds, waits)
    memory = (Scratch() if scratch is None else scratch).row(
        half + other_half, buffer.dtype, buffer.device
    )
    hops = list[BoundHop]()
    landings = list[Landing]()
    final = final_receives(program.hops, program.chunks)
    for number, hop in binder.hops():
        # hops that combine take turns in the two halves, if one is combined beside the next
        begin = half if waits.overlap and waits.parity[number] else 0
        places = binder.places(hop, memory[begin:], binder.final_place)
        group = binder.group(number, hop, places, reads=only_reads(hop))
        combinations = tuple(combinations_of(hop, program.rank, places, binder.own, add or adding))
        exchange = transport.bind(group)
        hops.append(BoundHop(exchange, combinations, number, waits.after[number], facts_of(group)))
        for receive, place, is_final in zip(hop.recvs, places, final[number], strict=True):
            if is_final:
                low = binder.bounds[receive.lo]
                landings.append(Landing(place, low, binder.bounds[receive.hi]))
    beside = streams if streams is not None and streams.queues and waits.overlap else None
    return BoundProgram(
        tuple(hops), binder.nbytes_sent, P2PGroup(binder.sends, binder.recvs), beside, landings
    )


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return `bounds` for `bind`: chunks of `row` that are equal if it divides."""
    return chunk_bounds(
        row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1
    )


def scratch_numel(program: Program, numel: int, bounds: Sequence[int] | None = None) -> int:
    """Return the elements of scratch of `program` on a buffer of `numel`, cut as for `bind`."""
    cut_at = chunk_bounds(numel, program.chunks, GRANULE) if bounds is None else bounds
    return sum(_halves(program, cut_at, dependencies(program.hops, program.chunks)))


def _halves(program: Program, bounds: Sequence[int], waits: Dependencies) -> tuple[int, int]:
    """Return scratch elements of even and odd hops; (all, 0) if each waits for the one before."""
    even = [0]
    odd = [0]
    for hop, parity in zip(program.hops, waits.parity, strict=True):
        numel = sum(padded(bounds[each.hi] - bounds[each.lo]) for each in hop.combined)
        (odd if waits.overlap and parity else even).append(numel)
    return max(even), max(odd)


class Binder:
    """A program on `buffer`, cut at `bounds`, while hops are bound; for one thread, and used once.

    What its hops exchange is noted in `sends` and `recvs`, by `group`. `commrt.runtime.reading`
    binds in another way, with the same parts.
    """

    def __init__(
        self, program: Program, buffer: Tensor, transport: Transport, bounds: Sequence[int] | None
    ) -> None:
        self.program = program
        self.buffer = buffer
        self.transport = transport
        # cut so that 16-byte accesses stay aligned in every dtype
        self.bounds = (
            chunk_bounds(buffer.numel(), program.chunks, GRANULE) if bounds is None else bounds
        )
        self.sends = list[P2PMessage]()
        self.recvs = list[P2PMessage]()

    def hops(self) -> Iterator[tuple[int, Hop]]:
        """Yield the hops in which this rank exchanges something, with their numbers."""
        return ((number, hop) for number, hop in enumerate(self.program.hops) if not hop.idle)

    def own(self, transfer: Transfer) -> Tensor:
        """Return the chunks of `transfer` in the buffer."""
        return self.buffer[self.bounds[transfer.lo] : self.bounds[transfer.hi]]

    def final_place(self, receive: Transfer) -> Tensor | None:
        """Return where `receive` stays; None for one that is combined from scratch memory."""
        return self.own(receive) if receive.combine == COPY else None

    def group(
        self, number: int, hop: Hop, places: Sequence[Tensor], *, reads: bool = False
    ) -> P2PGroup:
        """Return the messages of a hop, whose receives go to `places`, and note them."""
        sends = [P2PMessage(each.peer, self.own(each), each.group) for each in hop.sends]
        recvs = [
            P2PMessage(each.peer, place, each.group)
            for each, place in zip(hop.recvs, places, strict=True)
        ]
        self.sends += sends
        self.recvs += recvs
        return P2PGroup(sends, recvs, number, reads)

    def places(
        self, hop: Hop, scratch: Tensor, place_of: Callable[[Transfer], Tensor | None]
    ) -> list[Tensor]:
        """Return each receive's memory: ``place_of(receive)``, or if None the next `scratch`."""
        places = []
        used = 0
        for each in hop.recvs:
            if (place := place_of(each)) is None:
                numel = self.own(each).numel()
                place = scratch[used : used + numel]
                used = used + padded(numel)
            places.append(place)
        return places

    @property
    def nbytes_sent(self) -> int:
        """Bytes of all messages so far that this rank sends."""
        return sum(message.data.nbytes for message in self.sends)


def combinations_of(
    hop: Hop,
    rank: int,
    places: Sequence[Tensor],
    own_of: Callable[[Transfer], Tensor],
    add: Adding = adding,
) -> Iterator[Combination]:
    """Yield what combines `hop`'s receives, at `places`, with ``own_of(receive)``, range by range.

    One kernel adds all that comes for one range, in order of ranks: `rank`'s own value is added in
    its place.
    """
    # each by sender
    ranges = defaultdict[tuple[int, int, Combine], list[tuple[Transfer, Tensor]]](list)
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
            yield from (
                mixing(own, place, leg.weight) for leg, place in zip(legs, received, strict=True)
            )


def only_reads(hop: Hop) -> bool:
    """Return True if no peer reads what combining changes: senders may lend memory for the hop."""
    apart = all(
        sent.hi <= own.lo or own.hi <= sent.lo for sent in hop.sends for own in hop.combined
    )
    return apart and len(hop.combined) == len(hop.recvs)


def facts_of(group: P2PGroup) -> dict[str, int | str]:
    """Return what a trace says of a hop."""
    to, source = (
        ", ".join(map(str, sorted({p.peer for p in side}))) for side in (group.sends, group.recvs)
    )
    return {
        "number": group.hop,
        "to": to,
        "from": source,
        "nbytes": sum(p.data.nbytes for p in group.sends),
    }
