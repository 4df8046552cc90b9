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
from commrt.program import Hop, Leg, Program, spans
from commrt.recording import Recorder, within_range
from commrt.schedule import ADD, COPY
from commrt.transport.protocol import Exchange, Group, Moment, Parcel, Transport

__all__ = ["BoundProgram", "bind", "scratch_numel"]

Combination = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BoundHop:
    """A hop whose every transfer knows its memory."""

    exchange: Exchange
    combinations: tuple[Combination, ...]
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

    def run(self, moment: Moment, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread; raises `TransportError`, leaving the buffer half done."""
        if recorder is not None:
            self._run_recorded(moment, recorder)
            return
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


def bind(program: Program, buffer: Tensor, transport: Transport, scratch: Tensor | None = None) -> BoundProgram:
    """Bind `program` to `buffer` [numel], cut in the program's chunks.

    `scratch` [>= scratch_numel] of the same dtype may be shared by programs that never run at the same time;
    None allocates it.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(f"a buffer must be one contiguous row, not of shape {tuple(buffer.shape)}: flatten it first")
    bounds = spans(buffer.numel(), program.chunks, GRANULE)  # so that 16-byte accesses stay aligned in every dtype
    if scratch is None:
        scratch = torch.empty(_scratch(program, bounds), dtype=buffer.dtype, device=buffer.device)
    binder = _Binder(buffer, scratch, bounds, transport)
    hops = tuple(binder.hop(number, hop) for number, hop in enumerate(program.hops) if hop.sends or hop.recvs)
    elements = sum(bounds[leg.hi] - bounds[leg.lo] for hop in program.hops for leg in hop.sends)
    return BoundProgram(hops, elements * buffer.element_size(), Group(binder.sends, binder.recvs))


def scratch_numel(program: Program, numel: int) -> int:
    """Elements of scratch that `program` needs on a buffer of `numel` elements."""
    return _scratch(program, spans(numel, program.chunks, GRANULE))


def _scratch(program: Program, bounds: list[int]) -> int:
    combined = ([leg for leg in hop.recvs if leg.combine != COPY] for hop in program.hops)
    return max((sum(padded(bounds[leg.hi] - bounds[leg.lo]) for leg in legs) for legs in combined), default=0)


@dataclass(frozen=True, slots=True)
class _Binder:
    buffer: Tensor
    scratch: Tensor
    bounds: list[int]
    transport: Transport
    sends: list[Parcel] = field(default_factory=list)
    recvs: list[Parcel] = field(default_factory=list)
    """What all hops bound so far exchange."""

    def hop(self, number: int, hop: Hop) -> BoundHop:
        landing = self._landing(hop)
        sends = [Parcel(leg.peer, self._own(leg)) for leg in hop.sends]
        recvs = [Parcel(leg.peer, place) for leg, place in zip(hop.recvs, landing, strict=True)]
        self.sends.extend(sends)
        self.recvs.extend(recvs)
        exchange = self.transport.bind(Group(sends, recvs, number))
        return BoundHop(exchange, tuple(self._combinations(hop, landing)), _facts(number, sends, recvs))

    def _own(self, leg: Leg) -> Tensor:
        return self.buffer[self.bounds[leg.lo] : self.bounds[leg.hi]]

    def _landing(self, hop: Hop) -> list[Tensor]:
        """Where each receive of a hop lands: in place, or in the next free piece of scratch."""
        places, used = [], 0
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
