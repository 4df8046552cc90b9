# SPDX-License-Identifier: Apache-2.0
"""One collective as a rank asks for it: what it puts into the wire, and what it takes out of it.

A wire is a row of *slots*. A slot holds a piece that moves as a whole: a rank's share in an all-gather, say, or the
whole buffer in a broadcast. A call of any size travels as slices that fit the wire, one after the other, so a slot may
be empty in the last slices. All ranks have the same slots at the same places, of the same sizes, whatever the layout of
their tensors; but in an all-to-all, slots of which a rank is neither end are empty there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms.catalogue import ROOTED
from commrt.kernels.layout import padded
from commrt.program import chunk_bounds

__all__ = ["GRANULE", "Call", "Kind", "Piece", "Slice", "Traits", "bounds_of"]

GRANULE = 16
"""Elements, or bytes of what only moves: a slot's size is a multiple. In an `all_to_all`, where only the two ends of a
transfer know its size, a slot has exactly that size: so two ends that differ notice it."""


class Piece(NamedTuple):
    """Where the piece of a slot lies: in a row of the call, from element `begin` on."""

    slot: int
    row: int
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


class Slice(NamedTuple):
    """A part of each piece of a call: elements [lo, lo + size) of the piece in each slot."""

    lo: int
    sizes: tuple[int, ...]
    """[slots] what this slice has of each piece."""
    shape: tuple[int, ...]
    """[slots] the size of each slot."""
    places: tuple[int, ...]
    """[slots + 1] where each slot begins in the wire, and the end."""


class Kind(NamedTuple):
    """A call without its memory: calls of one kind run the same programs on the same wire."""

    traits: Traits
    sizes: tuple[int, ...]
    """[slots] elements of each piece, in elements of the wire's dtype; 0 for a slot that this rank does not use."""
    put: tuple[Piece, ...]
    """What this rank contributes."""
    take: tuple[Piece, ...]
    """Where this rank wants the result."""
    device: torch.device
    divisor: int = 1
    """What the result is divided by; integers are rounded towards zero, as by NCCL."""
    is_scaled: bool = False
    """True if each rank's contribution is multiplied by a factor of its own."""

    def slices(self, slot_numel: int) -> Iterator[Slice]:
        """Yield the slices, with at most `slot_numel` elements of each piece."""
        for lo in range(0, max(self.sizes, default=0), slot_numel):
            sizes = tuple([min(max(size - lo, 0), slot_numel) for size in self.sizes])
            shape = sizes if self.traits.numel is None else tuple(map(padded, sizes))
            yield Slice(lo, sizes, shape, tuple(accumulate(shape, initial=0)))


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


@dataclass(slots=True, eq=False)
class Call:
    """One collective, checked. Rows share memory with the caller's tensors, or are copies of what has gaps."""

    kind: Kind
    put: Sequence[Tensor]
    """The rows of what this rank contributes."""
    take: Sequence[Tensor]
    """The rows for the result."""
    result: Sequence[Tensor]
    """The caller's tensors that hold the result at the end."""
    timeout_s: float | None = None
    factor: Tensor | float | None = None
    """What this rank's contribution is multiplied by."""
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """(target, row) pairs to copy at the end: tensors with gaps, and the rows that are taken for them."""
