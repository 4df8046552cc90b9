# SPDX-License-Identifier: Apache-2.0
"""A rank's program on a buffer: bound once to addresses, then run with as little Python as possible.

What arrives to be copied goes straight to its place; what arrives to be combined goes to scratch and is combined
after the group has ended, so a rank may send a chunk and add to it in the same hop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.dispatch import adding, mixing
from commrt.kernels.layout import GRANULE, padded
from commrt.program import Hop, Leg, Program, Waits, spans, waits_of
from commrt.recording import Recorder, within_range
from commrt.schedule import ADD, COPY
from commrt.threads.streams import Mark, Streams
from commrt.transport.protocol import Exchange, Group, Moment, Parcel, Transport

__all__ = ["BoundProgram", "bind", "scratch_numel"]

Combination = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BoundHop:
    """A hop whose every transfer knows its memory."""

    exchange: Exchange
    combinations: tuple[Combination, ...]
    number: int
    """In the schedule."""
    after: int | None
    """Number of the latest hop whose combinations must be done before the exchange."""
    facts: dict[str, int | str]
    """For people."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program on one buffer."""

    hops: tuple[BoundHop, ...]
    nbytes_sent: int
    """Bytes this rank sends in one run."""
    group: Group
    """All parcels of all hops."""
    streams: Streams | None
    """Where combinations run beside exchanges; None if they take turns."""

    def run(self, moment: Moment, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread; raises `TransportError`, leaving the buffer half done."""
        if self.streams is not None:
            self._run_on_two_streams(moment, self.streams, recorder)
        elif recorder is not None:
            self._run_recorded(moment, recorder)
        else:
            for hop in self.hops:
                hop.exchange(moment)
                for combine in hop.combinations:
                    combine()

    def _run_recorded(self, moment: Moment, recorder: Recorder) -> None:
        for hop in self.hops:
            with within_range(recorder, "hop", **hop.facts):
                hop.exchange(moment)
            if hop.combinations:
                with within_range(recorder, "combine"):
                    for combine in hop.combinations:
                        combine()

    def _run_on_two_streams(self, moment: Moment, streams: Streams, recorder: Recorder | None) -> None:
        combined: dict[int, Mark] = {}
        for hop in self.hops:
            if hop.after in combined:
                streams.follow(combined[hop.after])
            with within_range(recorder, "hop", **hop.facts):
                hop.exchange(moment)
            if hop.combinations:
                came = streams.mark()
                with streams.aside(), within_range(recorder, "combine"):
                    streams.follow(came)
                    for combine in hop.combinations:
                        combine()
                    combined[hop.number] = streams.mark()
        for last in list(combined.values())[-1:]:
            streams.follow(last)


def bind(
    program: Program,
    buffer: Tensor,
    transport: Transport,
    scratch: Tensor | None = None,
    streams: Streams | None = None,
) -> BoundProgram:
    """Bind `program` to `buffer` [numel], cut in the program's chunks.

    `scratch` [>= scratch_numel] of the same dtype may be shared by programs that never run at the same time;
    None allocates it. On `streams` that queue, what arrived in one hop is combined beside the next exchange if that
    touches something else.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(f"a buffer must be one contiguous row, not of shape {tuple(buffer.shape)}: flatten it first")
    bounds = spans(buffer.numel(), program.chunks, GRANULE)  # so that 16-byte accesses stay aligned in every dtype
    if scratch is None:
        scratch = torch.empty(_scratch(program, bounds), dtype=buffer.dtype, device=buffer.device)
    waits = waits_of(program.hops, program.chunks)
    binder = _Binder(buffer, scratch, bounds, transport, _halves(program, bounds, waits)[0])
    hops = tuple(binder.hop(number, hop, waits) for number, hop in enumerate(program.hops) if not hop.idle)
    elements = sum(bounds[leg.hi] - bounds[leg.lo] for hop in program.hops for leg in hop.sends)
    beside = streams if streams is not None and streams.queues and waits.overlap else None
    return BoundProgram(hops, elements * buffer.element_size(), Group(binder.sends, binder.recvs), beside)


def scratch_numel(program: Program, numel: int) -> int:
    """Elements of scratch that `program` needs on a buffer of `numel` elements."""
    return _scratch(program, spans(numel, program.chunks, GRANULE))


def _scratch(program: Program, bounds: list[int]) -> int:
    return sum(_halves(program, bounds, waits_of(program.hops, program.chunks)))


def _halves(program: Program, bounds: list[int], waits: Waits) -> tuple[int, int]:
    """Elements of scratch for hops of either parity; all for one where every hop waits for the one before."""
    sizes = [[0], [0]]
    for hop, parity in zip(program.hops, waits.parity, strict=True):
        sizes[parity * waits.overlap].append(sum(padded(bounds[leg.hi] - bounds[leg.lo]) for leg in hop.combined))
    return max(sizes[0]), max(sizes[1])


@dataclass(frozen=True, slots=True)
class _Binder:
    buffer: Tensor
    scratch: Tensor
    bounds: list[int]
    transport: Transport
    half: int
    """Where scratch for hops of odd parity begins."""
    sends: list[Parcel] = field(default_factory=list)
    recvs: list[Parcel] = field(default_factory=list)
    """What all hops bound so far exchange."""

    def hop(self, number: int, hop: Hop, waits: Waits) -> BoundHop:
        landing = self._landing(hop, self.half * waits.parity[number] * waits.overlap)
        sends = [Parcel(leg.peer, self._own(leg)) for leg in hop.sends]
        recvs = [Parcel(leg.peer, place) for leg, place in zip(hop.recvs, landing, strict=True)]
        self.sends.extend(sends)
        self.recvs.extend(recvs)
        exchange = self.transport.bind(Group(sends, recvs, number))
        return BoundHop(
            exchange, tuple(self._combinations(hop, landing)), number, waits.after[number], _facts(number, sends, recvs)
        )

    def _own(self, leg: Leg) -> Tensor:
        return self.buffer[self.bounds[leg.lo] : self.bounds[leg.hi]]

    def _landing(self, hop: Hop, used: int) -> list[Tensor]:
        """Where each receive of a hop lands: in place, or in the next piece of scratch that is not used."""
        places = []
        for leg in hop.recvs:
            own = self._own(leg)
            places.append(own if leg.combine == COPY else self.scratch[used : used + own.numel()])
            used += 0 if leg.combine == COPY else padded(own.numel())
        return places

    def _combinations(self, hop: Hop, landing: list[Tensor]) -> Iterator[Combination]:
        """What remains after the group, in order of sender; neighbours that add to one range share a pass."""
        pending = [(leg, place) for leg, place in zip(hop.recvs, landing, strict=True) if leg.combine != COPY]
        for (lo, hi, combine), run in groupby(pending, lambda pair: (pair[0].lo, pair[0].hi, pair[0].combine)):
            legs, places = zip(*run, strict=True)
            own = self.buffer[self.bounds[lo] : self.bounds[hi]]
            if not own.numel():
                continue
            if combine == ADD:
                yield adding(own, places)
            else:
                yield from (mixing(own, place, leg.weight) for leg, place in zip(legs, places, strict=True))


def _facts(number: int, sends: list[Parcel], recvs: list[Parcel]) -> dict[str, int | str]:
    to, source = (", ".join(str(peer) for peer in sorted({p.peer for p in side})) for side in (sends, recvs))
    return {"number": number, "to": to, "from": source, "nbytes": sum(parcel.data.nbytes for parcel in sends)}
