# SPDX-License-Identifier: Apache-2.0
"""A rank's program on a wire that carries codes instead of values.

Codes do not add: each rank quantizes every value once, either what it gives away to be summed, or the sum that it has
formed. What was received to be added is dequantized and added in fp32. What is copied is passed on as it came, and at
the end all ranks dequantize the same codes, so their results are equal bit by bit. The rank that formed a sum
dequantizes its own codes too.

With feedback, `residual` holds for each value what rounding lost when this rank gave it away, or when it quantized a
sum. It is added the next time this rank quantizes that value, whichever of the two it does then.

The beginning of a buffer, its *head*, travels as it is: flags must not be rounded.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import NamedTuple

from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.kernels.quantize import adding_quantized, dequantizing, key_of, quantizing
from commrt.program import Hop, Program, Transfer, chunk_bounds
from commrt.quantizer import Quantizer
from commrt.runtime.executor import BoundProgram, only_reads
from commrt.runtime.recording import Recorder, within_range
from commrt.schedule import ADD, COPY
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

__all__ = [
    "ZEROS",
    "QuantizedBuffers",
    "QuantizedProgram",
    "bind_quantized",
    "quantized_bounds",
    "scratch_nbytes",
]

Quantize = Callable[[int], None]
"""Codes with the random numbers that a key selects."""
KEYS = 1 << 64
ZEROS = repeat(0)
"""Numbers of calls whose tags tell them apart."""


class QuantizedBuffers(NamedTuple):
    """The memory of a program; programs that never run at the same time may share codes and scratch."""

    values: Tensor
    """fp32 [numel]"""
    codes: Tensor
    """uint8 [quantizer.nbytes(numel)]"""
    scratch: Tensor
    """uint8 [scratch_nbytes]"""
    residual: Tensor | None
    """fp32 [numel], for quantizers with feedback."""


@dataclass(frozen=True, slots=True)
class _QuantizedHop:
    """One hop: what is quantized before its exchange, and what is added after it."""

    quantizings: tuple[tuple[int, Quantize], ...]
    """(first chunk, what codes it and those that follow it)"""
    exchange: Exchange
    additions: tuple[Callable[[], object], ...]
    number: int

    def run(self, key: int, tag: Tag) -> None:
        """Code, exchange and add."""
        for first, quantize in self.quantizings:
            quantize((key + first) % KEYS)  # other random numbers for each chunk
        return_borrowed = self.exchange(tag)
        for add in self.additions:
            add()
        if return_borrowed is not None:
            return_borrowed()


@dataclass(frozen=True, slots=True)
class QuantizedProgram:
    """A program on one buffer whose values travel as codes."""

    head: BoundProgram
    hops: tuple[_QuantizedHop, ...]
    dequantize: Callable[[], object]
    quantizer: Quantizer
    rank: int
    nbytes_sent: int
    """Bytes that this rank sends in one run."""
    calls: Iterator[int]
    """Numbers of the runs, where tags come again."""
    elsewhere: Parts = NO_PARTS
    """Nothing: all values are dequantized to the buffer."""

    def finish(self, tag: Tag) -> None:
        """Do nothing; see `BoundProgram.finish`."""

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread; see `BoundProgram.run`.

        Stochastic rounding takes other random numbers for each step and bucket of `tag`, and for each of `calls`.
        """
        key = key_of(self.quantizer.seed, tag.step, _number(tag.bucket) + (next(self.calls) << 32), self.rank)
        self.head.run(tag, recorder)
        for hop in self.hops:
            with within_range(recorder, "quantized hop", number=hop.number):
                hop.run(key, tag)
        self.dequantize()


def _number(bucket: int | str) -> int:
    return bucket if isinstance(bucket, int) else zlib.crc32(bucket.encode())


def quantized_bounds(numel: int, chunks: int, quantizer: Quantizer) -> list[int]:
    """Return where `chunks` chunks begin in a buffer of `numel` values, [chunks + 1]: at whole tiles."""
    return chunk_bounds(numel, chunks, quantizer.tile_numel)


def scratch_nbytes(program: Program, numel: int, quantizer: Quantizer) -> int:
    """Return the bytes of scratch that `program` needs on a buffer of `numel` values."""
    bounds = quantized_bounds(numel, program.chunks, quantizer)
    return max(
        (sum(quantizer.nbytes(bounds[each.hi] - bounds[each.lo]) for each in hop.combined) for hop in program.hops),
        default=0,
    )


def bind_quantized(
    program: Program,
    head: BoundProgram,
    buffers: QuantizedBuffers,
    quantizer: Quantizer,
    transport: Transport,
    calls: Iterator[int] = ZEROS,
) -> QuantizedProgram:
    """Bind `program` to `buffers`; `head` is the program of the part that travels as it is.

    Raises `UsageError` for a schedule in which a rank would code a value twice, or that mixes.
    """
    binder = _Binder(program, buffers, quantizer, transport)
    hops = tuple(binder.hop(number, hop) for number, hop in enumerate(program.hops) if not hop.idle)
    dequantize = dequantizing(buffers.codes, buffers.values, quantizer)
    return QuantizedProgram(
        head, hops, dequantize, quantizer, program.rank, head.nbytes_sent + binder.nbytes_sent, calls
    )


@dataclass(slots=True)
class _Binder:
    program: Program
    buffers: QuantizedBuffers
    quantizer: Quantizer
    transport: Transport
    bounds: Sequence[int] = field(init=False)
    nbytes_sent: int = 0
    _is_quantized: list[bool] = field(init=False)
    """[chunks] True for chunks whose codes are those of their values, or came from another rank."""

    def __post_init__(self) -> None:
        self.bounds = quantized_bounds(len(self.buffers.values), self.program.chunks, self.quantizer)
        self._is_quantized = [False] * self.program.chunks

    def hop(self, number: int, hop: Hop) -> _QuantizedHop:
        quantizings = tuple(self._quantizings(hop))
        places = self._receive_places(hop)
        sends = [P2PMessage(each.peer, self._codes(each.lo, each.hi)) for each in hop.sends]
        recvs = [P2PMessage(each.peer, place) for each, place in zip(hop.recvs, places, strict=True)]
        self.nbytes_sent += sum(message.data.nbytes for message in sends)
        exchange = self.transport.bind(P2PGroup(sends, recvs, number, only_reads(hop)))
        additions = tuple(self._additions(hop, places))
        for each in hop.recvs:
            self._receive(each)
        return _QuantizedHop(quantizings, exchange, additions, number)

    def _quantizings(self, hop: Hop) -> Iterator[tuple[int, Quantize]]:
        """Yield what codes the chunks that `hop` sends and that have no codes yet."""
        wanted = sorted(
            {chunk for each in hop.sends for chunk in range(each.lo, each.hi) if not self._is_quantized[chunk]}
        )
        for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            chunks = [chunk for _, chunk in run]
            lo, hi = chunks[0], chunks[-1] + 1
            self._is_quantized[lo:hi] = [True] * (hi - lo)
            if self.bounds[lo] < self.bounds[hi]:
                yield lo, quantizing(self._values(lo, hi), self._codes(lo, hi), self.quantizer, self._residual(lo, hi))

    def _receive(self, transfer: Transfer) -> None:
        chunks = range(transfer.lo, transfer.hi)
        if transfer.combine == COPY:
            self._is_quantized[transfer.lo : transfer.hi] = [True] * len(chunks)
        elif transfer.combine != ADD or any(self._is_quantized[chunk] for chunk in chunks):
            raise UsageError(
                f"a wire of {self.quantizer} needs a schedule in which a rank adds to its own values before it sends "
                "them: codes do not add; use algorithm=commrt.Direct()"
            )

    def _receive_places(self, hop: Hop) -> list[Tensor]:
        places, used = [], 0
        for each in hop.recvs:
            own = self._codes(each.lo, each.hi)
            places.append(own if each.combine == COPY else self.buffers.scratch[used : used + own.numel()])
            used += 0 if each.combine == COPY else own.numel()
        return places

    def _additions(self, hop: Hop, places: Sequence[Tensor]) -> Iterator[Callable[[], object]]:
        pending = [(each, place) for each, place in zip(hop.recvs, places, strict=True) if each.combine != COPY]
        for (lo, hi), run in groupby(pending, lambda pair: (pair[0].lo, pair[0].hi)):
            received = [place for _, place in run]
            if received[0].numel():
                yield adding_quantized(self._values(lo, hi), received, self.quantizer)

    def _values(self, lo: int, hi: int) -> Tensor:
        return self.buffers.values[self.bounds[lo] : self.bounds[hi]]

    def _residual(self, lo: int, hi: int) -> Tensor | None:
        residual = self.buffers.residual
        return None if residual is None else residual[self.bounds[lo] : self.bounds[hi]]

    def _codes(self, lo: int, hi: int) -> Tensor:
        begin = self.bounds[lo] // self.quantizer.tile_numel * self.quantizer.tile_nbytes
        return self.buffers.codes[begin : begin + self.quantizer.nbytes(self.bounds[hi] - self.bounds[lo])]
