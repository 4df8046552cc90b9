# SPDX-License-Identifier: Apache-2.0
"""Tensors of any dtypes as one row of bytes, in memory that stays from step to step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from commrt.transport.protocol import Allocate

__all__ = ["Row"]

ALIGNED = 16
"""Bytes between possible places, so that every dtype can lie at each."""


class Row:
    """Room for tensors with the dtypes and shapes of `like`, in memory from `allocate`."""

    def __init__(self, like: Sequence[Tensor], allocate: Allocate) -> None:
        sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in like]
        self._ends = [*accumulate(sizes, initial=0)]
        self._like = [torch.empty_like(tensor, device="meta") for tensor in like]
        self.flat = allocate(self._ends[-1], torch.uint8, like[0].device)
        """What travels."""
        self._now = torch.zeros_like(self.flat)
        self._parts, self._own = self._views(self.flat), self._views(self._now)
        self._kinds: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, tensor in enumerate(like):
            self._kinds[tensor.dtype].append(i)

    def _views(self, row: Tensor) -> list[Tensor]:
        pieces = (row[at : at + tensor.nbytes] for at, tensor in zip(self._ends, self._like, strict=False))
        return [piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, self._like, strict=True)]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """With `tensors`, in one launch per dtype."""
        self._copy(self._parts, tensors, range(len(tensors)))

    def empty(self, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
        """Overwrite `tensors` with what is in the row, where they differ.

        A graph that saved one of them then cannot run backward any more, as after any other write in place: autograd
        says so. It does not notice that those whose ids are in `unread` are written to. On a GPU the others are waited
        for, once if nothing differs.
        """
        hidden = [i for i, tensor in enumerate(tensors) if id(tensor) in unread]
        read = [i for i, tensor in enumerate(tensors) if id(tensor) not in unread]
        self._copy([tensor.data for tensor in tensors], self._parts, hidden)
        if read:
            self._copy(self._own, self._parts, hidden)
            self._copy(self._own, tensors, read)
            if not torch.equal(self._now, self.flat):
                self._overwrite_where_different(tensors, read)

    def _overwrite_where_different(self, tensors: Sequence[Tensor], read: Iterable[int]) -> None:
        for i in read:
            piece = slice(self._ends[i], self._ends[i + 1])
            if not torch.equal(self._now[piece], self.flat[piece]):
                with torch.no_grad():
                    tensors[i].copy_(self._parts[i])

    @torch.no_grad()
    def _copy(self, into: Sequence[Tensor], source: Sequence[Tensor], which: Iterable[int]) -> None:
        chosen = set(which)
        for members in self._kinds.values():
            if some := [i for i in members if i in chosen]:
                torch._foreach_copy_([into[i] for i in some], [source[i] for i in some])
