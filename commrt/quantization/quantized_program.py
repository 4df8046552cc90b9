# SPDX-License-Identifier: Apache-2.0
"""Programs that carry values as codes of few bits: binds them to buffers, and runs them.

On the communication thread, or the caller's in its place. They write the buffers, codes and
residuals that they are bound to, and know no model.

Codes do not add: each rank quantizes every value once, either what it gives away to be summed, or
the sum that it has formed. What was received to be added is dequantized and added in fp32. What is
copied is passed on as it came, and at the end all ranks dequantize the same codes, so their results
are equal bit by bit. The rank that formed a sum dequantizes its own codes too.

With feedback, `residual` holds for each value what rounding lost when this rank gave it away, or
when it quantized a sum. It is added the next time this rank quantizes that value, whichever of the
two it does then.

The beginning of a buffer, its *head*, travels as it is: flags must not be rounded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import numpy as np
from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.philox import key_of
from commrt.kernels.quantize_dispatch import adding_quantized, dequantizing, quantizing
from commrt.program import Hop, Program, chunk_bounds
from commrt.quantizer import Quantizer
from commrt.runtime.executor import BoundProgram, RunnableProgram, only_reads
from commrt.runtime.wire_carrier import ValuesOnWire
from commrt.schedule import ADD, COPY
from commrt.threads.recording import Recorder, within_range
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

Quantize = Callable[[int], None]
"""Computes codes with the random numbers that a key selects."""
KEYS = 1 << 64
ZEROS = repeat(0)  # numbers of calls whose tags tell them apart


def bind_values(
    program: Program,
    quantizer: Quantizer,
    buffers: Sequence[ValuesOnWire],
    transport: Transport,
    allocate: Callable[[str, int], Tensor],
    calls: Iterator[int] = ZEROS,
) -> list[QuantizedProgram]:
    """Return for each buffer a program: its head as it is, its values as codes.

    See `Carrier`. The programs share codes and scratch, as they never run at the same time. Raises
    `UsageError` for a schedule in which a rank would code twice, or that mixes.
    """
    numels = [len(each.values) for each in buffers]
    codes = allocate("quantized", max(map(quantizer.nbytes, numels)))
    scratch = allocate("received", max(_added_nbytes(program, quantizer, n) for n in numels))
    return [
        _Binder(program, each, quantizer, transport, codes, scratch).bound(calls)
        for each in buffers
    ]


def _added_nbytes(program: Program, quantizer: Quantizer, numel: int) -> int:
    """Return the most bytes that are received in one hop to be added to so many values."""
    bounds = chunk_bounds(numel, program.chunks, quantizer.tile_numel)
    sizes = (
        sum(quantizer.nbytes(bounds[each.hi] - bounds[each.lo]) for each in hop.combined)
        for hop in program.hops
    )
    return max(sizes, default=0)


@dataclass(frozen=True, slots=True)
class _QuantizedHop:
    """One hop: what is quantized before its exchange, and what is added after it."""

    # (first chunk, what codes it and those that follow it)
    quantizings: tuple[tuple[int, Quantize], ...]
    exchange: Exchange
    additions: tuple[Callable[[], object], ...]
    number: int

    def run(self, key: int, tag: Tag) -> None:
        for first, quantize in self.quantizings:
            quantize((key + first) % KEYS)  # other random numbers for each chunk
        return_borrowed = self.exchange(tag)
        for add in self.additions:
            add()
        if return_borrowed is not None:
            return_borrowed()


@dataclass(frozen=True, slots=True)
class QuantizedProgram(RunnableProgram):
    """A program on one buffer whose values travel as codes."""

    head: BoundProgram
    hops: tuple[_QuantizedHop, ...]
    dequantize: Callable[[], object]
    quantizer: Quantizer
    rank: int
    nbytes_sent: int
    calls: Iterator[int]  # numbers of the runs, where tags may be equal; each run takes the next

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread; see `BoundProgram.run`.

        Stochastic rounding takes other random numbers for each step and bucket of `tag`, and for
        each of `calls`.
        """
        bucket = tag.bucket if isinstance(tag.bucket, int) else zlib.crc32(tag.bucket.encode())
        key = key_of(self.quantizer.seed, tag.step, bucket + (next(self.calls) << 32), self.rank)
        self.head.run(tag, recorder)
        for hop in self.hops:
            with within_range(recorder, "quantized hop", number=hop.number):
                hop.run(key, tag)
        self.dequantize()


class _Binder:
    """Binds a program to one buffer, once.

    `codes` and `scratch`, uint8, have room for all values, and for `_added_nbytes`. Hops are bound
    in their order, as each one changes which chunks have codes.
    """

    def __init__(
        self,
        program: Program,
        buffer: ValuesOnWire,
        quantizer: Quantizer,
        transport: Transport,
        codes: Tensor,
        scratch: Tensor,
    ) -> None:
        self._program = program
        self._buffer = buffer
        self._quantizer = quantizer
        self._transport = transport
        self._memory_for_codes = codes
        self._scratch = scratch
        self._bounds = chunk_bounds(len(buffer.values), program.chunks, quantizer.tile_numel)
        self._nbytes_sent = 0  # by the hops that are bound
        # by chunk, after the hops that are bound
        self._is_quantized = np.zeros(program.chunks, dtype=bool)

    def bound(self, calls: Iterator[int]) -> QuantizedProgram:
        """Return the program, whose runs take their numbers from `calls`."""
        hops = tuple(
            self._bind_hop(number, hop)
            for number, hop in enumerate(self._program.hops)
            if not hop.idle
        )
        codes = self._codes(0, self._program.chunks)
        return QuantizedProgram(
            self._buffer.head,
            hops,
            dequantizing(codes, self._buffer.values, self._quantizer),
            self._quantizer,
            self._program.rank,
            self._buffer.head.nbytes_sent + self._nbytes_sent,
            calls,
        )

    def _bind_hop(self, number: int, hop: Hop) -> _QuantizedHop:
        quantizings = self._bind_quantizing(hop)
        places = self._place_received(hop)
        sends = [
            P2PMessage(each.peer, self._codes(each.lo, each.hi), each.group) for each in hop.sends
        ]
        recvs = [
            P2PMessage(each.peer, place, each.group)
            for each, place in zip(hop.recvs, places, strict=True)
        ]
        self._nbytes_sent += sum(message.data.nbytes for message in sends)
        exchange = self._transport.bind(P2PGroup(sends, recvs, number, only_reads(hop)))
        return _QuantizedHop(
            tuple(quantizings), exchange, tuple(self._additions(hop, places)), number
        )

    def _bind_quantizing(self, hop: Hop) -> list[tuple[int, Quantize]]:
        """Return what codes the chunks that `hop` sends and that had no codes; now they have."""
        bound: list[tuple[int, Quantize]] = []
        wanted = sorted(
            {
                chunk
                for each in hop.sends
                for chunk in range(each.lo, each.hi)
                if not self._is_quantized[chunk]
            }
        )
        for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            chunks = [chunk for _, chunk in run]
            lo = chunks[0]
            hi = chunks[-1] + 1
            self._is_quantized[lo:hi] = True
            if self._bounds[lo] < self._bounds[hi]:
                residual = (
                    None
                    if self._buffer.residual is None
                    else self._part(self._buffer.residual, lo, hi)
                )
                values = self._part(self._buffer.values, lo, hi)
                quantize = quantizing(values, self._codes(lo, hi), self._quantizer, residual)
                bound.append((lo, quantize))
        return bound

    def _place_received(self, hop: Hop) -> list[Tensor]:
        """Return where each receive of `hop` writes; chunks that it copies have codes then."""
        places: list[Tensor] = []
        used = 0
        for each in hop.recvs:
            if each.combine == COPY:
                self._is_quantized[each.lo : each.hi] = True
                places.append(self._codes(each.lo, each.hi))
            elif each.combine == ADD and not self._is_quantized[each.lo : each.hi].any():
                begin = used
                used = used + self._nbytes(each.lo, each.hi)
                places.append(self._scratch[begin:used])
            else:
                raise UsageError(
                    f"a wire of {self._quantizer} needs a schedule in which a rank adds to its own"
                    " values before it sends them: codes do not add; use algorithm=commrt.Direct()"
                )
        return places

    def _additions(self, hop: Hop, places: Sequence[Tensor]) -> Iterator[Callable[[], object]]:
        pending = [
            (each, place)
            for each, place in zip(hop.recvs, places, strict=True)
            if each.combine != COPY
        ]
        for (lo, hi), run in groupby(pending, lambda pair: (pair[0].lo, pair[0].hi)):
            received = [place for _, place in run]
            if received[0].numel():
                yield adding_quantized(
                    self._part(self._buffer.values, lo, hi), received, self._quantizer
                )

    def _part(self, row: Tensor, lo: int, hi: int) -> Tensor:
        return row[self._bounds[lo] : self._bounds[hi]]

    def _codes(self, lo: int, hi: int) -> Tensor:
        begin = self._bounds[lo] // self._quantizer.tile_numel * self._quantizer.tile_nbytes
        return self._memory_for_codes[begin : begin + self._nbytes(lo, hi)]

    def _nbytes(self, lo: int, hi: int) -> int:
        return self._quantizer.nbytes(self._bounds[hi] - self._bounds[lo])
