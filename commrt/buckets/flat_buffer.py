# SPDX-License-Identifier: Apache-2.0
"""One piece of memory that carries tensors of any dtypes as bytes, step after step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from commrt.transport.protocol import Allocate

__all__ = ["FlatBuffer"]

ALIGNMENT_NBYTES = 16
"""Each tensor begins at a multiple of this, which suits every dtype."""


class FlatBuffer:
    """Room for tensors with the dtypes and shapes of `like`, in memory from `allocate`; `flat` is what travels."""

    def __init__(self, like: Sequence[Tensor], allocate: Allocate) -> None:
        sizes = [-(-tensor.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for tensor in like]
        self._ends = [*accumulate(sizes, initial=0)]
        self._like = [torch.empty_like(tensor, device="meta") for tensor in like]
        self.flat = allocate(self._ends[-1], torch.uint8, like[0].device)
        self._now = torch.zeros_like(self.flat)
        self._parts, self._own = self._views(self.flat), self._views(self._now)
        self._by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, tensor in enumerate(like):
            self._by_dtype[tensor.dtype].append(i)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[at : at + like.nbytes].view(like.dtype).view(like.shape)
            for at, like in zip(self._ends, self._like, strict=False)
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` into the buffer, in one launch per dtype."""
        self._copy(self._parts, tensors, range(len(tensors)))

    def empty(self, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
        """Overwrite those of `tensors` that differ from the buffer.

        Autograd then refuses to run a graph backward that saved one of them, as after any write in place. It does not
        notice writes to tensors whose ids are in `unread`. On a GPU this waits for the other tensors, once if nothing
        differs.
        """
        hidden = [i for i, tensor in enumerate(tensors) if id(tensor) in unread]
        read = [i for i, tensor in enumerate(tensors) if id(tensor) not in unread]
        self._copy([tensor.data for tensor in tensors], self._parts, hidden)
        if not read:
            return
        self._copy(self._own, self._parts, hidden)
        self._copy(self._own, tensors, read)
        if not torch.equal(self._now, self.flat):
            for i in read:
                piece = slice(self._ends[i], self._ends[i + 1])
                if not torch.equal(self._now[piece], self.flat[piece]):
                    with torch.no_grad():
                        tensors[i].copy_(self._parts[i])

    @torch.no_grad()
    def _copy(self, into: Sequence[Tensor], source: Sequence[Tensor], which: Sequence[int]) -> None:
        chosen = set(which)
        for members in self._by_dtype.values():
            if some := [i for i in members if i in chosen]:
                torch._foreach_copy_([into[i] for i in some], [source[i] for i in some])
