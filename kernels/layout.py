# SPDX-License-Identifier: Apache-2.0
"""The layout of a wire buffer: a header, the flags, what rides along, then the tensors.

Each part begins at a multiple of 16 elements, so that accesses of 16 bytes are aligned in every
dtype. Kernels do not write the elements between two parts. Nobody reads them, except who codes a
whole wire in blocks: see `Layout.gaps`. Pure arithmetic and views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NoReturn

from torch import Tensor

WIDEST_NBYTES = 16
"""Bytes of the widest access of a GPU thread."""
GRANULE = 16
"""Elements; each part of a wire buffer begins at a multiple."""
HEADER_NUMEL = 64
"""Elements of the header, one for each bit of a 64-bit word: not 0 where the bit is set."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of the tensors in a wire buffer, in elements."""

    counts: tuple[int, ...]
    """[tensors] number of elements."""
    offsets: tuple[int, ...]
    """[tensors] index of the first element."""
    numel: int
    """Elements of the whole wire buffer."""
    riding: int = 0
    """Elements between the flags and the tensors that kernels leave alone."""

    @property
    def head_numel(self) -> int:
        """Return the elements of all that comes before the tensors."""
        return HEADER_NUMEL + padded(len(self.counts)) + self.riding

    def header(self, wire: Tensor) -> Tensor:
        """Return the view of `wire` that holds the header, [HEADER_NUMEL]."""
        return wire[:HEADER_NUMEL]

    def flags(self, wire: Tensor) -> Tensor:
        """Return the view of `wire` with the flags, [tensors]: not 0 for each that any rank had."""
        return wire[HEADER_NUMEL : HEADER_NUMEL + len(self.counts)]

    def riders(self, wire: Tensor) -> Tensor:
        """Return the view of `wire` that holds what rides along, [riding]."""
        return wire[self.head_numel - self.riding : self.head_numel]

    def tensor(self, wire: Tensor, index: int) -> Tensor:
        """Return the view of `wire` that holds tensor `index`, [counts[index]]."""
        return wire[self.offsets[index] : self.offsets[index] + self.counts[index]]

    def gaps(self) -> list[int]:
        """Return the indices of the elements that follow a tensor and belong to none.

        >>> layout_of([15, 16, 14]).gaps()
        [95, 126, 127]
        """
        ends = (offset + count for offset, count in zip(self.offsets, self.counts, strict=True))
        return [*chain.from_iterable(map(range, ends, [*self.offsets[1:], self.numel]))]


def padded(count: int) -> int:
    """Return `count` rounded up to a multiple of `GRANULE`."""
    return -(-count // GRANULE) * GRANULE


def layout_of(counts: Sequence[int], riding: int = 0) -> Layout:
    """Return the layout of tensors of `counts` elements, behind `riding` elements for other use.

    >>> layout_of([5, 0, 16, 17])
    Layout(counts=(5, 0, 16, 17), offsets=(80, 96, 96, 112), numel=144, riding=0)
    """
    head_numel = HEADER_NUMEL + padded(len(counts)) + padded(riding)
    *offsets, numel = accumulate(map(padded, counts), initial=head_numel)
    return Layout(tuple(counts), tuple(offsets), numel, padded(riding))


def refuse_count(tensors: Sequence[object], count: int) -> NoReturn:
    """Raise `ValueError` for `tensors` that are not one for each of a wire's `count`."""
    raise ValueError(
        f"{len(tensors)} tensors for a wire of {count}: pass one for each, None for an absent one"
    )
