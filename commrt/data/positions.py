# SPDX-License-Identifier: Apache-2.0
"""Deal the positions of an epoch to ranks by pure functions: ranks agree without a message."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranges = tuple[tuple[int, int], ...]
"""Positions in the order of their use; each pair is the first one and the one behind the last."""


def order_of(size: int, seed: int, epoch: int) -> NDArray[np.integer[Any]]:
    """Return the sample at each position of `epoch`, the same with every version of numpy.

    >>> order_of(6, seed=0, epoch=1).tolist()
    [4, 5, 1, 2, 0, 3]
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(bits, kind="stable")


def length(ranges: Ranges) -> int:
    """Return the number of positions."""
    return sum(end - begin for begin, end in ranges)


def split(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Return the first `count` positions, or all if there are fewer, and the others."""
    first: Ranges = ()
    for place, (begin, end) in enumerate(ranges):
        middle = min(begin + count, end)
        count -= middle - begin
        if middle > begin:
            first += ((begin, middle),)
        if middle < end:
            return first, ((middle, end), *ranges[place + 1 :])
    return first, ()


def deal(todo: Ranges, ranks: int, batch_size: int) -> tuple[list[Ranges], Ranges]:
    """Return what each rank takes in the next step, and what is left if all of it is used.

    The last step of an epoch is dealt evenly. If fewer positions than ranks are left, all ranks
    take the same ones: the mean of equal gradients is that gradient, and every rank has a batch.

    >>> deal(((0, 9),), ranks=2, batch_size=3)
    ([((0, 3),), ((3, 6),)], ((6, 9),))
    >>> deal(((6, 9),), ranks=2, batch_size=3)
    ([((6, 8),), ((8, 9),)], ())
    >>> deal(((8, 9),), ranks=2, batch_size=3)
    ([((8, 9),), ((8, 9),)], ())
    """
    taken, rest = split(todo, ranks * batch_size)
    count, more = divmod(length(taken), ranks)
    if not count:
        same, rest = split(todo, batch_size)
        return [same] * ranks, rest
    shares: list[Ranges] = []
    for rank in range(ranks):
        share, taken = split(taken, count + (rank < more))
        shares.append(share)
    return shares, rest


def left_after(todo: Ranges, ranks: int, batch_size: int, counted: Collection[int]) -> Ranges:
    """Return what is left after a step of the gradients of ranks `counted`; dropped ones come last.

    >>> left_after(((0, 9),), ranks=2, batch_size=3, counted=[1])
    ((6, 9), (0, 3))
    >>> left_after(((8, 9),), ranks=2, batch_size=3, counted=[])
    ((8, 9),)
    """
    shares, left = deal(todo, ranks, batch_size)
    used = {shares[rank] for rank in counted}
    if not used:
        return todo
    for share in shares:
        if share not in used:
            left = _joined(left, share)
    return left


def _joined(ranges: Ranges, more: Ranges) -> Ranges:
    if ranges and ranges[-1][1] == more[0][0]:
        return (*ranges[:-1], (ranges[-1][0], more[0][1]), *more[1:])
    return ranges + more
