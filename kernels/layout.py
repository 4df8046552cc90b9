# SPDX-License-Identifier: Apache-2.0
"""Where things lie on the wire: a header of stamp and flags, then the tensors.

Everything begins at a multiple of 16 elements, so that accesses of 16 bytes stay aligned in every dtype; what lies
between two tensors is never touched, and stays 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

__all__ = ["GRANULE", "STAMP_NUMEL", "Layout", "layout_of", "overlap", "padded", "require_as_many"]

GRANULE = 16
"""Elements between possible places on the wire."""
STAMP_NUMEL = 64
"""Elements of the stamp, one for each bit of a word: not 0 where the bit is set."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places on a wire, in elements."""

    counts: tuple[int, ...]
    """[tensors] elements of each tensor."""
    places: tuple[int, ...]
    """[tensors] where each begins."""
    numel: int
    """Elements of the whole wire."""

    def stamp(self, wire: Tensor) -> Tensor:
        """[STAMP_NUMEL] a view of `wire`."""
        return wire[:STAMP_NUMEL]

    def flags(self, wire: Tensor) -> Tensor:
        """[tensors] a view of `wire`: not 0 for each tensor that somebody had."""
        return wire[STAMP_NUMEL : STAMP_NUMEL + len(self.counts)]

    def tensor(self, wire: Tensor, index: int) -> Tensor:
        """[counts[index]] a view of `wire`."""
        return wire[self.places[index] : self.places[index] + self.counts[index]]


def padded(count: int) -> int:
    """`count`, or the next multiple of `GRANULE`."""
    return -(-count // GRANULE) * GRANULE


def layout_of(counts: Sequence[int]) -> Layout:
    """The layout of tensors of `counts` elements.

    >>> layout_of([5, 0, 16, 17])
    Layout(counts=(5, 0, 16, 17), places=(80, 96, 96, 112), numel=144)
    """
    header = STAMP_NUMEL + padded(len(counts))
    *places, numel = accumulate(map(padded, counts), initial=header)
    return Layout(tuple(counts), tuple(places), numel)


def require_as_many(tensors: Sequence[object], count: int) -> None:
    """Raise `ValueError` unless there is one for each of the `count` tensors of a wire."""
    if len(tensors) != count:
        raise ValueError(f"{len(tensors)} tensors for a wire of {count}: pass one for each, None for what is absent")


def overlap(addresses: Sequence[int], nbytes: Sequence[int]) -> tuple[int, int] | None:
    """Two of the pieces of memory, each of `nbytes` from its address, that share some of it, or None.

    >>> overlap([100, 300, 200], [100, 4, 101])
    (2, 1)
    >>> overlap([100, 300, 200, 250], [100, 4, 100, 0]) is None
    True
    """
    pieces = sorted((address, i) for i, address in enumerate(addresses) if nbytes[i])
    for (address, i), (following, j) in pairwise(pieces):
        if address + nbytes[i] > following:
            return i, j
    return None
