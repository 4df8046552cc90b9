# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors that one flipped bit changes, in one pass over their memory.

It reads memory, and keeps only views of it; `weight_watch` compares digests of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

WORD_NBYTES = 8
LARGE_NBYTES = 1 << 16
"""Smaller tensors are summed together, as a call for each would take longer than the sum."""
ROW = 64
"""Words that are summed without telling their places apart: to add in rows takes half the time of
columns.
"""
COLUMNS = 4093
"""Rows so far apart have the same weight in a sum; a prime, so that rows of a matrix do not."""
SPREAD = 0x9E3779B97F4A7C15
"""An odd number with bits everywhere: its multiples are weights of which no two small ones are
close.
"""


class Digest:
    """A weighted sum of all words of the memory of `tensors`, as integers, modulo 2 to the power of
    64.

    Weights tell places and tensors apart, so rows of words that change places change it too. One
    thread at a time: the communication thread in a step, the one that trains between steps.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._addresses: list[int] = []
        self._large: list[Tensor] = []
        self._small: list[Tensor] = []
        self._gappy: list[Tensor] = []

    @torch.no_grad()
    def now(self) -> int:
        """Return the digest of what `tensors` hold; on a GPU this waits."""
        if (addresses := [*map(Tensor.data_ptr, self._tensors)]) != self._addresses:
            self._addresses = addresses
            self._use([tensor.detach() for tensor in self._tensors if tensor.numel()])
        rest = [*self._small, *(bytes_of(each.contiguous()) for each in self._gappy)]
        sums = [weighted_sum(words) for words in (*self._large, *map(words_of, _by_device(rest)))]
        together = [each.to(sums[0].device) for each in sums]  # frozen tensors may lie elsewhere
        parts: list[int] = torch.stack(together).tolist() if sums else []
        return sum((2 * place + 1) * part for place, part in enumerate(parts)) & (2**64 - 1)

    def _use(self, tensors: Sequence[Tensor]) -> None:
        """Keep views of the memory of `tensors`, as it lies now."""
        dense = [(tensor, in_memory_order(tensor)) for tensor in tensors]
        self._gappy = [tensor for tensor, flat in dense if not flat.is_contiguous()]
        self._large = []
        self._small = []
        for memory in (bytes_of(flat) for _, flat in dense if flat.is_contiguous()):
            is_whole = not (memory.data_ptr() % WORD_NBYTES or len(memory) % WORD_NBYTES)
            if is_whole and len(memory) >= LARGE_NBYTES:
                self._large.append(memory.view(torch.int64))
            else:
                self._small.append(memory)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` with its dimensions in the order of their strides."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of the memory of `tensor`, which is contiguous, as bytes, flat."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(-1).view(torch.uint8)


def words_of(parts: Sequence[Tensor]) -> Tensor:
    """Return a copy of the bytes of all `parts`, and zeros behind them, as words."""
    missing = -sum(map(len, parts)) % WORD_NBYTES
    return torch.cat([*parts, parts[0].new_zeros(missing)]).view(torch.int64)


def _by_device(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    found = defaultdict[torch.device, list[Tensor]](list)
    for part in parts:
        found[part.device].append(part)
    return [*found.values()]


def weighted_sum(words: Tensor) -> Tensor:
    """Return the sum of `words` [n], int64, each times the weight of its row, as int64 []."""
    in_rows = len(words) // ROW * ROW
    rows = torch.cat([words[:in_rows].view(-1, ROW).sum(1), words[in_rows:]])
    whole = len(rows) // COLUMNS * COLUMNS
    columns = rows[:whole].view(-1, COLUMNS).sum(0)
    columns[: len(rows) - whole] += rows[whole:]
    return torch.sum(columns * _weights(words.device))


@cache
def _weights(device: torch.device) -> Tensor:
    numbers = np.arange(COLUMNS, dtype=np.uint64) * np.uint64(SPREAD) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
