# SPDX-License-Identifier: Apache-2.0
"""One collective as a rank asks for it: what it puts into the wire, and what it takes out of it.

A wire is a row of *slots*. A slot holds a piece that moves as a whole: a rank's share in an all-gather, say, or the
whole buffer in a broadcast. A call of any size travels as slices that fit the wire, one after the other, so a slot may
be empty in the last slices. All ranks have the same slots at the same places, of the same sizes, whatever the layout of
their tensors; but in an all-to-all, slots of which a rank is neither end are empty there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms.catalogue import ROOTED
from commrt.errors import UsageError
from commrt.kernels.layout import padded
from commrt.program import chunk_bounds

__all__ = ["GRANULE", "Call", "Placed", "Range", "Slice", "Traits", "bounds_of", "memory_of", "whole"]

GRANULE = 16
"""Elements, or bytes of what only moves: a slot's size is a multiple. In an `all_to_all`, where only the two ends of a
transfer know its size, a slot has exactly that size: so two ends that differ notice it."""

Range = tuple[int, int]
"""Elements [begin, end) of a slot."""


class Placed(NamedTuple):
    """Where the piece of a slot lies: in a contiguous row, from element `begin` on."""

    slot: int
    row: Tensor
    begin: int


class Traits(NamedTuple):
    """What must be equal on all ranks in one call."""

    collective: str
    slots: int
    numel: int | None
    """Elements of each piece; None where pieces differ (`all_to_all`)."""
    dtype: torch.dtype
    operation: str | None
    """What ADD stands for; None if nothing is combined."""
    root: int

    def __str__(self) -> str:
        """Name the call as in errors, such as ``all_reduce (sum) of float32[100]``."""
        if self.collective == "barrier":
            return self.collective
        how = f" ({self.operation})" if self.operation else ""
        from_root = f", root {self.root}" if self.collective in ROOTED else ""
        size = "" if self.numel is None else f"[{self.numel if self.slots == 1 else (self.slots, self.numel)}]"
        return f"{self.collective}{how} of {str(self.dtype)[6:]}{size}{from_root}"

    @property
    def nbytes(self) -> int:
        """Bytes of each piece; 0 where pieces differ."""
        return (self.numel or 0) * self.dtype.itemsize

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the wire: that of the tensors if they are combined, bytes otherwise."""
        return torch.uint8 if self.operation is None else self.dtype

    def number(self, more: str) -> int:
        """Return 32 bits that tell this kind of call, with `more` that must be equal, from others."""
        return _number(self, more)


@lru_cache(1024)
def _number(traits: Traits, more: str) -> int:
    return zlib.crc32(f"{traits} {more}".encode())


class Slice(NamedTuple):
    """A part of each piece of a call: elements [lo, lo + size) of the piece in each slot."""

    lo: int
    sizes: tuple[int, ...]
    """[slots] what this slice has of each piece."""
    shape: tuple[int, ...]
    """[slots] the size of each slot."""
    places: tuple[int, ...]
    """[slots + 1] where each slot begins in the wire, and the end."""


@lru_cache(256)
def _slice(lo: int, sizes: tuple[int, ...], is_padded: bool) -> Slice:
    shape = tuple(map(padded, sizes)) if is_padded else sizes
    return Slice(lo, sizes, shape, tuple(accumulate(shape, initial=0)))


def bounds_of(shape: Sequence[int], chunks_per_slot: int) -> list[int]:
    """Return the bounds of a schedule's chunks in a wire whose slots have the sizes `shape`, each cut into as many.

    >>> bounds_of([32, 0, 16], 1), bounds_of([32, 0, 16], 2)
    ([0, 32, 32, 48], [0, 16, 32, 32, 32, 48, 48])
    """
    bounds = [0]
    for size in shape:
        begin = bounds[-1]
        bounds += [begin + bound for bound in chunk_bounds(size, chunks_per_slot, GRANULE)[1:]]
    return bounds


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One collective, checked. Rows share memory with the caller's tensors, or are copies of what has gaps."""

    traits: Traits
    sizes: tuple[int, ...]
    """[slots] elements of each piece, in elements of the wire's dtype; 0 for a slot that this rank does not use."""
    put: Sequence[Placed]
    """What this rank contributes."""
    take: Sequence[Placed]
    """Where this rank wants the result."""
    result: Sequence[Tensor]
    """The caller's tensors that hold the result at the end."""
    device: torch.device
    factor: Tensor | float | None = None
    """What this rank's contribution is multiplied by."""
    divisor: int = 1
    """What the result is divided by; integers are rounded towards zero, as by NCCL."""
    timeout_s: float | None = None
    copies: Sequence[tuple[Tensor, Tensor]] = field(default=())
    """(target, row) pairs: tensors with gaps, and the rows that are taken for them."""

    def slices(self, slot_numel: int) -> Iterator[Slice]:
        """Yield the slices, with at most `slot_numel` elements of each piece."""
        is_padded = self.traits.numel is not None
        if 0 < (largest := max(self.sizes, default=0)) <= slot_numel:
            yield _slice(0, self.sizes, is_padded)
            return
        for lo in range(0, largest, slot_numel):
            yield _slice(lo, tuple([min(max(size - lo, 0), slot_numel) for size in self.sizes]), is_padded)

    def pack(self, wire: Tensor, part: Slice) -> None:
        """Write this rank's contribution to `wire`."""
        for slot, row, first in self.put:
            place, size, begin = part.places[slot], part.sizes[slot], first + part.lo
            target = wire[place : place + size]
            target.copy_(row[begin : begin + size])
            if self.factor is not None:
                target.mul_(self.factor)

    def unpack(self, wire: Tensor, part: Slice, ranges: Sequence[Sequence[Range]] | None = None) -> None:
        """Read the result from `wire`: all of each slot, or the given `ranges` [slots] of it."""
        for slot, row, first in self.take:
            place, offset = part.places[slot], first + part.lo
            for begin, end in [(0, part.sizes[slot])] if ranges is None else ranges[slot]:
                source = wire[place + begin : place + end]
                if self.divisor > 1:
                    is_exact = source.is_floating_point() or source.is_complex()
                    source.div_(self.divisor, rounding_mode=None if is_exact else "trunc")
                row[offset + begin : offset + end].copy_(source)

    def finish(self) -> None:
        """Copy the result to tensors with gaps."""
        for target, row in self.copies:
            target.copy_(row.view(target.dtype).view(target.shape))


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor`: of the tensor inside if a functional collective returned it, which is waited for.

    Writing to it does not count as an in-place change for autograd, as with Gloo. Raises `UsageError` for other
    subclasses that have no memory of their own, such as DTensor.
    """
    kind = type(tensor)
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return tensor.data
    if (wait := getattr(tensor, "trigger_wait", None)) is None:  # torch's AsyncCollectiveTensor has it
        raise UsageError(f"a {kind.__name__} cannot travel: pass the tensor in it, such as to_local() of a DTensor")
    return memory_of(wait())


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor` as a contiguous row of `dtype`: its own memory, or a copy if it has gaps."""
    plain = memory_of(tensor)
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    row = plain.contiguous().as_strided((plain.numel(),), (1,))  # a view would keep the stride of a single element
    return row if row.dtype is dtype else row.view(dtype)
