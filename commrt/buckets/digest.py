# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors that one flipped bit changes, in one pass over their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

SMALL_NUMEL = 1 << 14
"""Tensors of fewer words are summed together, as a call for each would take longer than the sum."""
COLUMNS = 4093
"""Words so far apart have the same weight in a sum; a prime, so that rows of a matrix do not."""
SPREAD = 0x9E3779B97F4A7C15
"""An odd number with bits everywhere: its multiples are weights of which no two small ones are close."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest:
    """A weighted sum of all words of `tensors` as integers, modulo 2 to the power of 64.

    Words are as wide as an element. Weights tell places and tensors apart, so words that change places change it too.
    """

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
        sums = [weighted_sum(words) for words in found]
        together = [each.to(sums[0].device) for each in sums]  # frozen tensors may lie elsewhere
        parts: list[int] = torch.stack(together).tolist() if sums else []
        return sum((2 * place + 1) * part for place, part in enumerate(parts)) & (2**64 - 1)

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


def weighted_sum(words: Tensor) -> Tensor:
    """Return the sum of `words` [n], each times the weight of its place, as int64 []."""
    weights, whole = _weights(words.device), len(words) // COLUMNS * COLUMNS
    columns = torch.sum(words[:whole].view(-1, COLUMNS), 0, dtype=torch.int64)
    rest = words[whole:]
    columns[: len(rest)] += rest
    return torch.sum(columns * weights)


@cache
def _weights(device: torch.device) -> Tensor:
    numbers = np.arange(COLUMNS, dtype=np.uint64) * np.uint64(SPREAD) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
