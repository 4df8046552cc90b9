# SPDX-License-Identifier: Apache-2.0
"""Move tensors to and from one wire buffer: the interface of a backend, and the backend in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import is_not
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from commrt.kernels.layout import HEADER_NUMEL, Layout, refuse_count
from commrt.kernels.plain_torch import mix, pack, pack_at_once, unpack

__all__ = ["NO_PARTS", "Packing", "Parts", "Repeatable", "TorchPacking", "bits", "views_of"]


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a wire that lie in other memory."""

    pieces: Sequence[tuple[Tensor, int, int]] = ()
    """(memory, begin, end): elements [begin, end) of the wire are those of `memory`."""

    def __bool__(self) -> bool:
        return bool(self.pieces)


NO_PARTS = Parts()
SMALL_NUMEL = 1 << 14
"""Tensors of so many elements, on average, are packed at once: see `pack_at_once`."""
KEPT = 256
"""Headers whose bits are kept: only one of a step is new."""


class Packing(Protocol):
    """Moves tensors to and from their places in one wire buffer.

    Tensors come in the order of the layout, None for an absent one. They may change from call to call, but not their
    dtypes, shapes and strides. Another number of tensors raises `ValueError`. On a GPU all work is queued on the
    current stream.
    """

    @property
    def mismatched(self) -> bool:
        """Return True if any `unpack` so far met another header than its own; on a GPU once its kernel has run."""

    def pack(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """Write tensors times `scale` to their places, zeros for None; also the flags and the bits of `header`."""

    def present(self) -> list[bool]:
        """Return for each tensor whether any rank had it; waits for the wire."""

    def unpack(self, tensors: Sequence[Tensor | None], header: int, parts: Parts = NO_PARTS) -> None:
        """Write places to tensors; compare the wire's header with `header`.

        The wire's `parts` are read where they lie, by a `Repeatable`; the same object again costs nothing. The header
        is always the wire's own.
        After a mismatch, plain torch writes nothing; a GPU notices it only while it writes.
        """

    def compare(self, header: int) -> None:
        """Compare the wire's header with `header`, as `unpack` does, and leave all tensors alone."""

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor, weight: float) -> None:
        """Compute ``tensor += weight * (received - sent)`` of wires of this layout."""


class Repeatable(Packing, Protocol):
    """A `Packing` whose launches can be recorded in a CUDA graph, and replayed with other tensors."""

    def aim(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """Set the tensors, scale and header for `pack_aimed` and `unpack_aimed`; absent tensors travel as zeros."""

    def load(self, parts: Parts = NO_PARTS) -> None:
        """Compile and load what the next three need, which cannot be done during a capture."""

    def cut(self, chunks: int) -> list[int]:
        """Return the bounds [chunks + 1] of an even cut of the wire, between tiles: parts may begin and end there."""

    def pack_aimed(self) -> None:
        """As `pack`, with one launch whose arguments never change, so a graph can record it."""

    def unpack_aimed(self, parts: Parts = NO_PARTS) -> None:
        """As `unpack`, with one launch whose arguments never change, so a graph can record it."""

    def compare_aimed(self) -> None:
        """As `compare`, with one launch whose arguments never change, so a graph can record it."""

    def repeated(self, tensors: Sequence[Tensor | None]) -> None:
        """Tell autograd that a replayed `unpack_aimed` wrote to `tensors`, the ones given to `aim`."""


class TorchPacking:
    """A `Packing` in plain torch: one call per tensor, on any device."""

    def __init__(self, wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> None:
        self._layout, self._like = layout, like
        self._views, self._row = views_of(wire, layout, like), wire[layout.head_numel :]
        self._packs_at_once = self._row.numel() <= SMALL_NUMEL * len(like) and all(t.dtype == wire.dtype for t in like)
        self._head, self._flags, self._header = wire[: layout.head_numel], layout.flags(wire), layout.header(wire)
        self.mismatched = False

    def pack(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """See `Packing.pack`."""
        if len(tensors) != len(self._like):
            refuse_count(tensors, len(self._like))
        if self._packs_at_once:
            pack_at_once(tensors, self._views, self._row, scale)
        else:
            pack(tensors, self._views, scale)
        self.seal(tensors, header)

    def pack_one(self, index: int, tensor: Tensor | None, scale: float) -> None:
        """Do what `pack` does for one tensor; `seal` then completes the wire."""
        pack([tensor], [self._views[index]], scale)

    def seal(self, tensors: Sequence[Tensor | None], header: int) -> None:
        """Write the flags of `tensors` and the bits of `header`."""
        self._head.copy_(_head(header, tuple(map(is_not, tensors, repeat(None))), self._head.numel()))

    def present(self) -> list[bool]:
        """See `Packing.present`."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(self, tensors: Sequence[Tensor | None], header: int, parts: Parts = NO_PARTS) -> None:
        """See `Packing.unpack`: compares the header first, and writes nothing after a mismatch."""
        if parts.pieces:
            raise ValueError("plain torch unpacks from the wire only")
        if len(tensors) != len(self._like):
            refuse_count(tensors, len(self._like))
        self.compare(header)
        if not self.mismatched:
            unpack(self._views, tensors)

    def compare(self, header: int) -> None:
        """See `Packing.compare`."""
        self.mismatched = self.mismatched or not torch.equal(self._header.bool().cpu(), bits(header))

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor, weight: float) -> None:
        """See `Packing.mix`: in fp32, or fp64 for fp64, rounded once."""
        if len(tensors) != len(self._like):
            refuse_count(tensors, len(self._like))
        went = views_of(sent, self._layout, self._like)
        mix(tensors, views_of(received, self._layout, self._like), went, weight)


def views_of(wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of `wire` that hold tensors of the shapes and strides of `like`."""
    begin = wire.storage_offset()
    pairs = zip(like, layout.places, strict=True)
    return [wire.as_strided(t.shape, t.stride(), begin + place) for t, place in pairs]


@lru_cache(KEPT)
def _head(header: int, present: tuple[bool, ...], numel: int) -> Tensor:
    """Return the head of a wire, bool [numel]: the bits of `header`, and which tensors are `present`."""
    head = torch.zeros(numel, dtype=torch.bool, device="cpu")
    head[:HEADER_NUMEL] = bits(header)
    head[HEADER_NUMEL : HEADER_NUMEL + len(present)] = torch.tensor(present, device="cpu")
    return head


@lru_cache(KEPT)
def bits(word: int) -> Tensor:
    """Return the 64 bits of `word`, lowest first, bool [64], to be read only.

    >>> bits(0b110).nonzero().flatten().tolist()
    [1, 2]
    """
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(word.to_bytes(8, "little"), np.uint8), bitorder="little").view(np.bool_)
    )
