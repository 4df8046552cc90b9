# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors that one flipped bit changes, in one pass over their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SMALL_NUMEL = 1 << 14
"""Tensors of fewer words are summed together, as a call for each would take longer than the sum."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Digest:
    """The sum of all words of `tensors` as integers, modulo 2 to the power of 64."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._addresses: list[int] = []
        self._large: list[Tensor] = []
        self._small: list[list[Tensor]] = []

    @torch.no_grad()
    def now(self) -> int:
        """Return the digest of what `tensors` hold; on a GPU this waits."""
        if (addresses := [*map(Tensor.data_ptr, self._tensors)]) != self._addresses:
            self._addresses = addresses
            self._use(words_of(tensor) for tensor in self._tensors if tensor.numel())
        sums = [torch.sum(words, dtype=torch.int64) for words in [*self._large, *map(torch.cat, self._small)]]
        return sum(torch.stack(sums).tolist()) & (2**64 - 1) if sums else 0

    def _use(self, words: Iterable[Tensor]) -> None:
        self._large, small = [], defaultdict[torch.dtype, list[Tensor]](list)
        for each in words:
            (self._large if each.numel() >= SMALL_NUMEL else small[each.dtype]).append(each)
        self._small = [*small.values()]


def words_of(tensor: Tensor) -> Tensor:
    """Return the memory of `tensor` as integers, flat and as wide as it allows; a copy where it has gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(order)
    flat = (dense if dense.is_contiguous() else dense.contiguous()).view(-1)
    begin, nbytes = flat.storage_offset() * flat.itemsize, flat.nbytes
    return flat.view(torch.int64 if begin % 8 == nbytes % 8 == 0 else WORDS[flat.itemsize])
