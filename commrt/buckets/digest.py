# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors that one flipped bit changes, in one pass over their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL_NUMEL = 1 << 14
"""Tensors of fewer words are summed together, as a call for each would take longer than the sum."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest:
    """The sum of all words of `tensors` as integers, modulo 2 to the power of 64; words are as wide as an element."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._addresses: list[int] = []
        self._large: list[Tensor] = []
        self._small: list[list[Tensor]] = []
        self._gappy: list[Tensor] = []

    @torch.no_grad()
    def now(self) -> int:
        """Return the digest of what `tensors` hold; on a GPU this waits."""
        if (addresses := [*map(Tensor.data_ptr, self._tensors)]) != self._addresses:
            self._addresses = addresses
            self._use([tensor.detach() for tensor in self._tensors if tensor.numel()])
        found = [*self._large, *map(torch.cat, self._small), *(words_of(each.contiguous()) for each in self._gappy)]
        sums = [torch.sum(words, dtype=torch.int64) for words in found]
        together = [each.to(sums[0].device) for each in sums]  # frozen tensors may lie elsewhere
        return sum(torch.stack(together).tolist()) & (2**64 - 1) if sums else 0

    def _use(self, tensors: Sequence[Tensor]) -> None:
        dense = [(tensor, in_memory_order(tensor)) for tensor in tensors]
        self._gappy = [tensor for tensor, flat in dense if not flat.is_contiguous()]
        self._large, small = [], defaultdict[torch.dtype, list[Tensor]](list)
        for words in (words_of(flat) for _, flat in dense if flat.is_contiguous()):
            (self._large if words.numel() >= SMALL_NUMEL else small[words.dtype]).append(words)
        self._small = [*small.values()]


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with its dimensions in the order of their strides."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def words_of(tensor: Tensor) -> Tensor:
    """Return a view of the memory of `tensor`, which is contiguous, as integers, flat."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(-1).view(WORDS[real.itemsize])
