# SPDX-License-Identifier: Apache-2.0
"""The binomial tree: broadcast and reduce in a logarithmic number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, Schedule, Step

__all__ = ["broadcast", "reduce"]


@lru_cache
def broadcast(p: int, root: int = 0) -> Schedule:
    """Copy the root's buffer to all ranks.

    Cost: ceil(log2(p)) steps; the root sends the buffer in each of them.

    >>> print(broadcast(4))
    broadcast: 4 ranks, 1 chunk
      0  copy  0->1 [0:1)
      1  copy  0->2 [0:1)  1->3 [0:1)
    """
    if not 0 <= root < p:
        raise UsageError(f"rank {root} cannot be the root of a broadcast over {p} ranks: choose one of 0..{p - 1}")

    def steps() -> Iterator[Step]:
        reached = 1
        while reached < p:
            src = np.arange(min(reached, p - reached))
            yield Step.of(src=(src + root) % p, dst=(src + reached + root) % p, lo=0, hi=1, combine=COPY)
            reached *= 2

    return Schedule("broadcast", p, 1, steps)


@lru_cache
def reduce(p: int, root: int = 0) -> Schedule:
    """Sum all ranks' buffers at the root: `broadcast` backwards.

    Cost: ceil(log2(p)) steps; each rank but the root sends the buffer once.

    >>> print(reduce(4))
    reduce: 4 ranks, 1 chunk
      0  add  2->0 [0:1)  3->1 [0:1)
      1  add  1->0 [0:1)
    """
    there = [(step.src, step.dst) for step in broadcast(p, root).steps()]

    def steps() -> Iterator[Step]:
        for src, dst in reversed(there):
            yield Step.of(src=dst, dst=src, lo=0, hi=1, combine=ADD)

    return Schedule("reduce", p, 1, steps)
