# SPDX-License-Identifier: Apache-2.0
"""Memory that carries tensors of any dtypes step after step: filled, sent, and written back.

The thread that ends a step's backward pass fills it (with backup workers the communication thread),
and writes what came over its caller's tensors, so that autograd notices. In between the
communication thread sends `FlatBuffer.flat`, or receives in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from commrt.transport.protocol import Allocate

ALIGNMENT_NBYTES = 16
"""Each tensor begins at a multiple of this, which suits every dtype (`flatten` leaves no gaps)."""


class FlatBuffer:
    """Memory from `allocate` for tensors like `like`."""

    def __init__(self, like: Sequence[Tensor], allocate: Allocate) -> None:
        sizes = [-(-tensor.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for tensor in like]
        self._begins = [*accumulate(sizes, initial=0)]  # and where the last one ends
        self.flat = allocate(self._begins[-1], torch.uint8, like[0].device)
        """All bytes, which travel."""
        self.parts = self._views(self.flat, like)
        """Views of `flat` as the tensors."""
        # what the tensors hold, for `write_back` to compare
        self._now = torch.zeros_like(self.flat)
        self._parts_now = self._views(self._now, like)

    def _views(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        return [
            flat[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
            for begin, each in zip(self._begins, like, strict=False)
        ]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy `tensors` into the buffer, in one launch per dtype."""
        self._copy(self.parts, tensors, range(len(tensors)))

    def write_back(self, tensors: Sequence[Tensor], unread: frozenset[int] = frozenset()) -> None:
        """Overwrite `tensors` that differ from the buffer; autograd notices as in `restore`.

        On a GPU this waits for the tensors that are not `unread`, once if nothing differs.
        """
        hidden = [i for i, tensor in enumerate(tensors) if id(tensor) in unread]
        read = [i for i, tensor in enumerate(tensors) if id(tensor) not in unread]
        self._copy([tensor.data for tensor in tensors], self.parts, hidden)
        if not read:
            return
        self._copy(self._parts_now, self.parts, hidden)
        self._copy(self._parts_now, tensors, read)
        if not torch.equal(self._now, self.flat):
            for i in read:
                piece = slice(self._begins[i], self._begins[i] + tensors[i].nbytes)
                if not torch.equal(self._now[piece], self.flat[piece]):
                    with torch.no_grad():
                        tensors[i].copy_(self.parts[i])

    @torch.no_grad()
    def _copy(self, into: Sequence[Tensor], source: Sequence[Tensor], which: Sequence[int]) -> None:
        by_dtype = defaultdict[torch.dtype, list[int]](list)
        for i in which:
            by_dtype[source[i].dtype].append(i)
        for some in by_dtype.values():
            torch._foreach_copy_([into[i] for i in some], [source[i] for i in some])
