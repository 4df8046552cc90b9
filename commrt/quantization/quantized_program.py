# SPDX-License-Identifier: Apache-2.0
"""A rank's program on a wire that carries codes instead of values.

Codes do not add: each rank codes every value once, either what it gives away to be summed, or the sum that it has
formed. What was received to be added is decoded and added in fp32. What is copied is passed on as it came, and at the
end all ranks decode the same codes, so their results are equal bit by bit. The rank that formed a sum decodes its own
codes too.

With feedback, `residual` holds for each value what this rank still owes to the sum: what coding lost when it gave a
value away, or when it coded a sum. It is added the next time this rank codes that value, whichever of the two it does
then.

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
from commrt.kernels.codes import key_of
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.kernels.quantizing import adding_codes, decoding, encoding
from commrt.program import Hop, Program, Transfer, chunk_bounds
from commrt.quantizer import Quantizer
from commrt.runtime.executor import BoundProgram, only_reads
from commrt.runtime.recording import Recorder, within_range
from commrt.schedule import ADD, COPY
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

__all__ = [
    "ZEROS",
    "CodeBuffers",
    "CodedProgram",
    "bind_codes",
    "code_bounds",
    "scratch_nbytes",
]

Encode = Callable[[int], None]
"""Codes with the random numbers that a key selects."""
KEYS = 1 << 64
ZEROS = repeat(0)
"""Numbers of calls whose tags tell them apart."""


class CodeBuffers(NamedTuple):
    """The memory of a program; programs that never run at the same time may share codes and scratch."""

    values: Tensor
    """fp32 [numel]"""
    codes: Tensor
    """uint8 [coding.nbytes(numel)]"""
    scratch: Tensor
    """uint8 [scratch_nbytes]"""
    residual: Tensor | None
    """fp32 [numel], for codings with feedback."""


@dataclass(frozen=True, slots=True)
class _CodedHop:
    """One hop: what is coded before its exchange, and what is added after it."""

    encodings: tuple[tuple[int, Encode], ...]
    """(first chunk, what codes it and those that follow it)"""
    exchange: Exchange
    additions: tuple[Callable[[], None], ...]
    number: int

    def run(self, key: int, tag: Tag) -> None:
        """Code, exchange and add."""
        for first, encode in self.encodings:
            encode((key + first) % KEYS)  # other random numbers for each chunk
        end_loan = self.exchange(tag)
        for add in self.additions:
            add()
        if end_loan is not None:
            end_loan()


@dataclass(frozen=True, slots=True)
class CodedProgram:
    """A program on one buffer whose values travel as codes."""

    head: BoundProgram
    hops: tuple[_CodedHop, ...]
    decode: Callable[[], None]
    coding: Quantizer
    rank: int
    nbytes_sent: int
    """Bytes that this rank sends in one run."""
    calls: Iterator[int]
    """Numbers of the runs, where tags come again."""
    elsewhere: Parts = NO_PARTS
    """Nothing: all values are decoded to the buffer."""

    def finish(self, tag: Tag) -> None:
        """Do nothing; see `BoundProgram.finish`."""

    def run(self, tag: Tag, recorder: Recorder | None = None) -> None:
        """Run all hops in order on the calling thread; see `BoundProgram.run`.

        Stochastic rounding takes other random numbers for each step and bucket of `tag`, and for each of `calls`.
        """
        key = key_of(self.coding.seed, tag.step, _number(tag.bucket) + (next(self.calls) << 32), self.rank)
        self.head.run(tag, recorder)
        for hop in self.hops:
            with within_range(recorder, "coded hop", number=hop.number):
                hop.run(key, tag)
        self.decode()


def _number(bucket: int | str) -> int:
    return bucket if isinstance(bucket, int) else zlib.crc32(bucket.encode())


def code_bounds(numel: int, chunks: int, coding: Quantizer) -> list[int]:
    """Return where `chunks` chunks begin in a buffer of `numel` values, [chunks + 1]: at whole tiles."""
    return chunk_bounds(numel, chunks, coding.tile_numel)


def scratch_nbytes(program: Program, numel: int, coding: Quantizer) -> int:
    """Return the bytes of scratch that `program` needs on a buffer of `numel` values."""
    bounds = code_bounds(numel, program.chunks, coding)
    return max(
        (sum(coding.nbytes(bounds[each.hi] - bounds[each.lo]) for each in hop.combined) for hop in program.hops),
        default=0,
    )


def bind_codes(
    program: Program,
    head: BoundProgram,
    buffers: CodeBuffers,
    coding: Quantizer,
    transport: Transport,
    calls: Iterator[int] = ZEROS,
) -> CodedProgram:
    """Bind `program` to `buffers`; `head` is the program of the part that travels as it is.

    Raises `UsageError` for a schedule in which a rank would code a value twice, or that mixes.
    """
    binder = _Binder(program, buffers, coding, transport)
    hops = tuple(binder.hop(number, hop) for number, hop in enumerate(program.hops) if not hop.idle)
    decode = decoding(buffers.codes, buffers.values, coding)
    return CodedProgram(head, hops, decode, coding, program.rank, head.nbytes_sent + binder.nbytes_sent, calls)


@dataclass(slots=True)
class _Binder:
    program: Program
    buffers: CodeBuffers
    coding: Quantizer
    transport: Transport
    bounds: Sequence[int] = field(init=False)
    nbytes_sent: int = 0
    _is_coded: list[bool] = field(init=False)
    """[chunks] True for chunks whose codes are those of their values, or came from another rank."""

    def __post_init__(self) -> None:
        self.bounds = code_bounds(len(self.buffers.values), self.program.chunks, self.coding)
        self._is_coded = [False] * self.program.chunks

    def hop(self, number: int, hop: Hop) -> _CodedHop:
        encodings = tuple(self._encodings(hop))
        places = self._receive_places(hop)
        sends = [P2PMessage(each.peer, self._codes(each.lo, each.hi)) for each in hop.sends]
        recvs = [P2PMessage(each.peer, place) for each, place in zip(hop.recvs, places, strict=True)]
        self.nbytes_sent += sum(message.data.nbytes for message in sends)
        exchange = self.transport.bind(P2PGroup(sends, recvs, number, only_reads(hop)))
        additions = tuple(self._additions(hop, places))
        for each in hop.recvs:
            self._receive(each)
        return _CodedHop(encodings, exchange, additions, number)

    def _encodings(self, hop: Hop) -> Iterator[tuple[int, Encode]]:
        """Yield what codes the chunks that `hop` sends and that have no codes yet."""
        wanted = sorted({chunk for each in hop.sends for chunk in range(each.lo, each.hi) if not self._is_coded[chunk]})
        for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            chunks = [chunk for _, chunk in run]
            lo, hi = chunks[0], chunks[-1] + 1
            self._is_coded[lo:hi] = [True] * (hi - lo)
            if self.bounds[lo] < self.bounds[hi]:
                yield lo, encoding(self._values(lo, hi), self._codes(lo, hi), self.coding, self._residual(lo, hi))

    def _receive(self, transfer: Transfer) -> None:
        chunks = range(transfer.lo, transfer.hi)
        if transfer.combine == COPY:
            self._is_coded[transfer.lo : transfer.hi] = [True] * len(chunks)
        elif transfer.combine != ADD or any(self._is_coded[chunk] for chunk in chunks):
            raise UsageError(
                f"a wire of {self.coding} needs a schedule in which a rank adds to its own values before it sends "
                "them: codes do not add; use algorithm=commrt.Direct()"
            )

    def _receive_places(self, hop: Hop) -> list[Tensor]:
        places, used = [], 0
        for each in hop.recvs:
            own = self._codes(each.lo, each.hi)
            places.append(own if each.combine == COPY else self.buffers.scratch[used : used + own.numel()])
            used += 0 if each.combine == COPY else own.numel()
        return places

    def _additions(self, hop: Hop, places: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
        pending = [(each, place) for each, place in zip(hop.recvs, places, strict=True) if each.combine != COPY]
        for (lo, hi), run in groupby(pending, lambda pair: (pair[0].lo, pair[0].hi)):
            received = [place for _, place in run]
            if received[0].numel():
                yield adding_codes(self._values(lo, hi), received, self.coding)

    def _values(self, lo: int, hi: int) -> Tensor:
        return self.buffers.values[self.bounds[lo] : self.bounds[hi]]

    def _residual(self, lo: int, hi: int) -> Tensor | None:
        residual = self.buffers.residual
        return None if residual is None else residual[self.bounds[lo] : self.bounds[hi]]

    def _codes(self, lo: int, hi: int) -> Tensor:
        begin = self.bounds[lo] // self.coding.tile_numel * self.coding.tile_nbytes
        return self.buffers.codes[begin : begin + self.coding.nbytes(self.bounds[hi] - self.bounds[lo])]
