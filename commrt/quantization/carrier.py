# SPDX-License-Identifier: Apache-2.0
"""Programs that carry codes of few bits: all functions of a `Carrier` (`commrt.runtime.wire`).

Used on the communication thread, or in place of it. They write the buffers, codes and residuals
that they are given, and know no model.

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
import torch
from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.philox import key_of
from commrt.kernels.quantize_dispatch import adding_quantized, dequantizing, quantizing
from commrt.program import Hop, Program, chunk_bounds
from commrt.quantizer import Adaptive, Progress, Quantizer
from commrt.runtime.executor import BoundProgram, RunnableProgram, only_reads
from commrt.runtime.wire import ValuesOnWire
from commrt.schedule import ADD, COPY
from commrt.threads.recording import Recorder, within_range
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport

Quantize = Callable[[int], None]
"""Computes codes with the random numbers that a key selects."""
KEYS = 1 << 64
ZEROS = repeat(0)  # numbers of calls whose tags tell them apart


class step_quantizer:  # noqa: N801  # a function of `Carrier`
    """The quantizer of each step: always the same one, or what an `Adaptive` wire's rule says."""

    def __init__(self, wire: Quantizer | Adaptive) -> None:
        self._wire = wire
        self._now = wire.quantizer(None) if isinstance(wire, Adaptive) else wire
        self.resume(None)

    def resume(self, norm: float | None) -> None:
        """Go on after a step whose average had this `norm`."""
        self._step: int | None = None
        self._squares: list[Tensor] = []  # of the norms of this step's buckets
        self._resumed = norm

    def at(self, step: int) -> Quantizer:
        """Return the quantizer of `step`, after all of the step before was averaged."""
        if isinstance(self._wire, Adaptive) and step != self._step:
            norm = self.norm
            self._now = self._wire.quantizer(None if norm is None else Progress(step, norm))
            self._step = step
            self._squares = []
            self._resumed = None
        return self._now

    def note(self, average: Tensor) -> None:
        """Look at a bucket's `average`, fp32 [numel], of the step that runs."""
        if isinstance(self._wire, Adaptive):
            self._squares.append(torch.linalg.vector_norm(average, dtype=torch.float64).square())

    @property
    def norm(self) -> float | None:
        """The norm of the latest average, rounded to fp32: the order of sums does not matter."""
        if not self._squares:
            return self._resumed
        return float(torch.stack(self._squares).sum().sqrt().float())


def check_residual(wire: Quantizer, residual: Tensor | None, tensor: Tensor) -> None:
    """Raise `UsageError` unless there is a residual for `tensor` exactly with feedback."""
    if wire.feedback != (residual is not None):
        raise UsageError(
            f"{wire} with residual={'a tensor' if residual is not None else None}: a wire with"
            " feedback needs a residual, where it keeps what rounding lost from call to call, and"
            " others take none"
        )
    if residual is None:
        return
    if (
        not isinstance(residual, Tensor)
        or residual.data_ptr() == tensor.data_ptr() != 0
        or residual.is_inference()
    ):
        raise UsageError(
            "residual= needs a tensor of its own, no inference tensor, of zeros at first, in each"
            " call"
        )
    right = (torch.float32, (tensor.numel(),), tensor.device, True)
    if (residual.dtype, residual.shape, residual.device, residual.is_contiguous()) != right:
        raise UsageError(
            f"residual= needs torch.zeros({tensor.numel()}, device={str(tensor.device)!r}), made"
            " once"
        )


def bind_values(
    program: Program,
    quantizer: Quantizer,
    buffers: Sequence[ValuesOnWire],
    transport: Transport,
    allocate: Callable[[str, int], Tensor],
    calls: Iterator[int] = ZEROS,
) -> list[QuantizedProgram]:
    """Return for each buffer a program: its head as it is, its values as codes; see `Carrier`."""
    binders = [_Binder(program, each, quantizer, transport) for each in buffers]
    codes = allocate("quantized", max(quantizer.nbytes(len(each.values)) for each in buffers))
    scratch = allocate("received", max(binder.scratch_nbytes() for binder in binders))
    return [binder.bound(codes, scratch, calls) for binder in binders]


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
    calls: Iterator[int]  # numbers of the runs, where tags come again

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
    """Binds a program to one buffer; those that never run together may share codes and scratch."""

    def __init__(
        self, program: Program, buffer: ValuesOnWire, quantizer: Quantizer, transport: Transport
    ) -> None:
        self.program = program
        self.buffer = buffer
        self.quantizer = quantizer
        self.transport = transport
        self.bounds = chunk_bounds(len(buffer.values), program.chunks, quantizer.tile_numel)
        self.nbytes_sent = 0
        self._is_quantized = np.zeros(program.chunks, dtype=bool)

    def scratch_nbytes(self) -> int:
        """Return the bytes for what is received in one hop to be added."""
        sizes = (
            sum(self._nbytes(each.lo, each.hi) for each in hop.combined)
            for hop in self.program.hops
        )
        return max(sizes, default=0)

    def bound(self, codes: Tensor, scratch: Tensor, calls: Iterator[int]) -> QuantizedProgram:
        """Return the program on `codes` and `scratch`, uint8.

        `codes` has at least the bytes of all values, `scratch` those of `scratch_nbytes`. Raises
        `UsageError` for a schedule in which a rank would code twice, or that mixes.
        """
        self.codes = codes
        self.scratch = scratch
        hops = tuple(
            self.hop(number, hop) for number, hop in enumerate(self.program.hops) if not hop.idle
        )
        dequantize = dequantizing(
            self._codes(0, self.program.chunks), self.buffer.values, self.quantizer
        )
        nbytes_sent = self.buffer.head.nbytes_sent + self.nbytes_sent
        return QuantizedProgram(
            self.buffer.head,
            hops,
            dequantize,
            self.quantizer,
            self.program.rank,
            nbytes_sent,
            calls,
        )

    def hop(self, number: int, hop: Hop) -> _QuantizedHop:
        quantizings = tuple(self._quantizings(hop))
        places = [*self._receive_places(hop)]
        sends = [
            P2PMessage(each.peer, self._codes(each.lo, each.hi), each.group) for each in hop.sends
        ]
        recvs = [
            P2PMessage(each.peer, place, each.group)
            for each, place in zip(hop.recvs, places, strict=True)
        ]
        self.nbytes_sent += sum(message.data.nbytes for message in sends)
        exchange = self.transport.bind(P2PGroup(sends, recvs, number, only_reads(hop)))
        return _QuantizedHop(quantizings, exchange, tuple(self._additions(hop, places)), number)

    def _quantizings(self, hop: Hop) -> Iterator[tuple[int, Quantize]]:
        """Yield what codes the chunks that `hop` sends and that have no codes yet."""
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
            if self.bounds[lo] < self.bounds[hi]:
                residual = (
                    None
                    if self.buffer.residual is None
                    else self._part(self.buffer.residual, lo, hi)
                )
                values = self._part(self.buffer.values, lo, hi)
                yield lo, quantizing(values, self._codes(lo, hi), self.quantizer, residual)

    def _receive_places(self, hop: Hop) -> Iterator[Tensor]:
        used = 0
        for each in hop.recvs:
            if each.combine == COPY:
                self._is_quantized[each.lo : each.hi] = True
                yield self._codes(each.lo, each.hi)
            elif each.combine == ADD and not self._is_quantized[each.lo : each.hi].any():
                begin = used
                used = used + self._nbytes(each.lo, each.hi)
                yield self.scratch[begin:used]
            else:
                raise UsageError(
                    f"a wire of {self.quantizer} needs a schedule in which a rank adds to its own"
                    " values before it sends them: codes do not add; use algorithm=commrt.Direct()"
                )

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
                    self._part(self.buffer.values, lo, hi), received, self.quantizer
                )

    def _part(self, row: Tensor, lo: int, hi: int) -> Tensor:
        return row[self.bounds[lo] : self.bounds[hi]]

    def _codes(self, lo: int, hi: int) -> Tensor:
        begin = self.bounds[lo] // self.quantizer.tile_numel * self.quantizer.tile_nbytes
        return self.codes[begin : begin + self._nbytes(lo, hi)]

    def _nbytes(self, lo: int, hi: int) -> int:
        return self.quantizer.nbytes(self.bounds[hi] - self.bounds[lo])
