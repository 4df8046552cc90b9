# SPDX-License-Identifier: Apache-2.0
"""Packing in plain torch, on any device: tensors into a wire and out of it, its header and flags.

One thread at a time: the one that averages; for messages of gossip, the one that trains. Views of
gradients (`buckets/view_bucket`) call the parts of `pack` themselves: `pack_one` on the thread that
trains, as a large gradient becomes ready, and on the one that averages for those that are left;
there also `seal`, after `move_at_once` where all are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, repeat
from operator import is_
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from commrt.kernels.layout import Layout, refuse_count
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.kernels.plain_torch import PIECE_NUMEL, mix_into, pack

SMALL_NUMEL = 1 << 14
"""Tensors of so many elements, on average, are packed at once: see `pack_at_once`."""

KEPT = 256
"""Headers whose bits are kept: only one of a step is new."""


def pack_at_once(
    sources: Sequence[Tensor | None], targets: list[Tensor], row: Tensor, scale: float
) -> None:
    """Do what `pack` does for targets in one `row` of the sources' dtype: copy all, scale the row.

    Per tensor it saves a call: 0.5 in place of 2.8 us at 1,024 elements, 2.9 for 4.3 at 16,384.
    Tensors that do not fit a core's cache are read and written twice: 20 for 17 us at 65,536.
    """
    present, views = present_pairs(sources, targets)
    if views is not targets:
        row.zero_()
    if present:
        torch._foreach_copy_(views, present)
        if scale != 1:
            row.mul_(scale)


def present_pairs(
    tensors: Sequence[Tensor | None], views: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are there, and their `views`; `views` itself if all are."""
    if True not in map(is_, tensors, repeat(None)):
        return [*tensors], views  # type: ignore[list-item]  # a cast would be a call
    there = [tensor is not None for tensor in tensors]
    return cast("list[Tensor]", [*compress(tensors, there)]), [*compress(views, there)]


class _Group(NamedTuple):
    """Tensors in a row, scaled on a stage in their own dtype before the cast; or a large one."""

    members: slice
    staged: list[Tensor]
    """Their views of the stage; none for a large one."""
    stage: Tensor
    wire: Tensor
    has_gaps: bool = False


def _groups(
    wire: Tensor, layout: Layout, like: Sequence[Tensor], views: Sequence[Tensor]
) -> list[_Group]:
    """Return groups of up to `PIECE_NUMEL` elements."""
    groups = list[_Group]()
    first = 0
    ends = [*layout.offsets[1:], layout.numel]
    stage = torch.zeros(PIECE_NUMEL, device=wire.device)
    while first < len(like):
        begin = layout.offsets[first]
        stop = first + 1
        while stop < len(like) and ends[stop] - begin <= PIECE_NUMEL:
            stop += 1
        numel = ends[stop - 1] - begin
        if numel > PIECE_NUMEL:
            groups.append(_Group(slice(first, stop), [], stage[:0], views[first]))
        else:
            pairs = zip(like[first:stop], layout.offsets[first:stop], strict=True)
            staged = [stage.as_strided(t.shape, t.stride(), offset - begin) for t, offset in pairs]
            has_gaps = numel > sum(layout.counts[first:stop])
            part = wire[begin : begin + numel]
            groups.append(_Group(slice(first, stop), staged, stage[:numel], part, has_gaps))
        first = stop
    return groups


class _Mixes(NamedTuple):
    """The wire that `mix` last received, and the views of its tensors."""

    received: Tensor
    views: list[Tensor]


class TorchPacking:
    """A `Packing` in plain torch, on any device; small tensors are copied together."""

    def __init__(self, wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> None:
        self._layout = layout
        self._like = like
        self._count = len(like)
        self._views = views_of(wire, layout, like)
        self._row = wire[layout.head_numel :]
        are_small = self._row.numel() <= SMALL_NUMEL * len(like)
        dtypes = {tensor.dtype for tensor in like}
        self.packs_at_once = are_small and dtypes == {wire.dtype}
        """True if small tensors are copied together; see `pack_at_once`. Never changes."""
        is_narrow = wire.dtype in {torch.bfloat16, torch.float16} and dtypes == {torch.float32}
        self._groups = _groups(wire, layout, like, self._views) if are_small and is_narrow else []
        self._flags = layout.flags(wire)
        self._header = layout.header(wire)
        self._head = wire[: layout.head_numel]
        self._head_bits = torch.zeros(layout.head_numel, dtype=torch.bool, device="cpu")
        self._bits = layout.header(self._head_bits)
        layout.flags(self._head_bits).fill_(True)
        self.mismatched = False
        """Set by `compare` alone, never taken back; any thread may read it."""
        self._mixes: _Mixes | None = None

    def pack(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """See `Packing.pack`."""
        if len(tensors) != self._count:
            refuse_count(tensors, self._count)
        if self.packs_at_once:
            pack_at_once(tensors, self._views, self._row, scale)
        elif self._groups and True not in map(is_, tensors, repeat(None)):
            for members, staged, stage, wire, has_gaps in self._groups:
                if staged:
                    if has_gaps:
                        stage.zero_()
                    torch._foreach_copy_(staged, cast("list[Tensor]", [*tensors[members]]))
                    wire.copy_(stage if scale == 1 else stage.mul_(scale))
                else:
                    pack(tensors[members], [wire], scale)
        else:
            pack(tensors, self._views, scale)
        self.seal(tensors, header)

    def pack_one(self, index: int, tensor: Tensor | None, scale: float) -> None:
        """Do what `pack` does for one tensor; `seal` then completes the wire."""
        pack([tensor], [self._views[index]], scale)

    def move_at_once(
        self, tensors: Sequence[Tensor | None], are_there: Sequence[bool], scale: float
    ) -> None:
        """Do what `pack` does before it seals, if all go at once and some `are_there` already."""
        if True in are_there or True in map(is_, tensors, repeat(None)):
            for view, tensor, is_there in zip(self._views, tensors, are_there, strict=True):
                if tensor is None:
                    view.zero_()
                elif not is_there:
                    view.copy_(tensor)
        else:
            torch._foreach_copy_(self._views, cast("list[Tensor]", tensors))
        self._row.mul_(scale)

    def seal(self, tensors: Sequence[Tensor | None], header: int) -> None:
        """Write the bits of `header`, the flags of `tensors`, and zeros for what rides."""
        self._bits.copy_(bits(header))
        self._head.copy_(self._head_bits)
        for index, tensor in enumerate(tensors):
            if tensor is None:
                self._flags[index] = 0

    def present(self) -> list[bool]:
        """See `Packing.present`."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(
        self, tensors: Sequence[Tensor | None], header: int, parts: Parts = NO_PARTS
    ) -> None:
        """See `Packing.unpack`: compares the header first, and writes nothing after a mismatch."""
        if parts.pieces:
            raise ValueError("plain torch unpacks from the wire only")
        if len(tensors) != self._count:
            refuse_count(tensors, self._count)
        self.compare(header)
        present, values = present_pairs(tensors, self._views)
        if present and not self.mismatched:
            torch._foreach_copy_(present, values)

    def compare(self, header: int) -> None:
        """See `Packing.compare`."""
        found = self._header.bool() if self._header.is_cpu else self._header.bool().cpu()
        self.mismatched = self.mismatched or not torch.equal(found, bits(header))

    def mix(
        self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor, weight: float
    ) -> None:
        """See `Packing.mix`: in fp32, or fp64 for fp64, rounded once."""
        if len(tensors) != self._count:
            refuse_count(tensors, self._count)
        if self._mixes is None or self._mixes.received is not received:
            self._mixes = _Mixes(received, views_of(received, self._layout, self._like))
        views = self._mixes.views
        is_wide = sent.dtype in {torch.float32, torch.float64}
        if self.packs_at_once and is_wide and True not in map(is_, tensors, repeat(None)):
            head = self._layout.head_numel
            torch.sub(received[head:], sent[head:], out=received[head:]).mul_(weight)
            torch._foreach_add_(cast("list[Tensor]", [*tensors]), views)
            return
        for own, came, went in zip(
            tensors, views, views_of(sent, self._layout, self._like), strict=True
        ):
            if own is not None:
                mix_into(own, came, weight, went)


def views_of(wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of `wire` that hold tensors of the shapes and strides of `like`."""
    begin = wire.storage_offset()
    pairs = zip(like, layout.offsets, strict=True)
    return [wire.as_strided(t.shape, t.stride(), begin + offset) for t, offset in pairs]


@lru_cache(KEPT)
def bits(word: int) -> Tensor:
    """Return the 64 bits of `word`, lowest first, bool [64], to be read only.

    >>> bits(0b110).nonzero().flatten().tolist()
    [1, 2]
    """
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(word.to_bytes(8, "little"), np.uint8), bitorder="little").view(
            np.bool_
        )
    )
