# SPDX-License-Identifier: Apache-2.0
"""The binomial tree: broadcast, reduce, scatter, gather in log2(p) steps, or in parts with a ring.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import numpy as np

from commrt.algorithms import ring
from commrt.algorithms.arguments import require_root
from commrt.algorithms.parts import backwards, wrapped
from commrt.algorithms.registration import Registration, all_but_one, doublings, twice_all_but_one
from commrt.schedule import ADD, COPY, Schedule, Step


@lru_cache
def broadcast(p: int, root: int = 0) -> Schedule:
    """Copy the root's buffer to all ranks.

    Cost: ceil(log2(p)) steps; the root sends the buffer in each of them.

    >>> print(broadcast(4))
    tree broadcast: 4 ranks, 1 chunk
      0  copy  0->1 [0:1)
      1  copy  0->2 [0:1)  1->3 [0:1)
    """
    require_root(p, root, "broadcast")

    def steps() -> Iterator[Step]:
        reached = 1
        while reached < p:
            src = np.arange(min(reached, p - reached))
            yield Step.of(
                src=(src + root) % p, dst=(src + reached + root) % p, lo=0, hi=1, combine=COPY
            )
            reached *= 2

    return Schedule("tree broadcast", p, 1, steps)


@lru_cache
def reduce(p: int, root: int = 0) -> Schedule:
    """Sum all ranks' buffers at the root: `broadcast` backwards.

    Cost: ceil(log2(p)) steps; each rank but the root sends the buffer once.

    >>> print(reduce(4))
    tree reduce: 4 ranks, 1 chunk
      0  add  2->0 [0:1)  3->1 [0:1)
      1  add  1->0 [0:1)
    """
    return backwards(broadcast(p, root), ADD, "tree reduce")


@lru_cache
def scatter(p: int, root: int = 0) -> Schedule:
    """Copy chunk r from the root to rank r, together with the chunks that rank r passes on.

    Cost: ceil(log2(p)) steps; the root sends (p - 1)/p of the buffer, half of it in the first step.

    >>> print(scatter(4))
    tree scatter: 4 ranks, 4 chunks
      0  copy  0->2 [2:4)
      1  copy  0->1 [1:2)  2->3 [3:4)
    >>> print(scatter(3, root=1))
    tree scatter: 3 ranks, 3 chunks
      0  copy  1->0 [0:1)
      1  copy  1->2 [2:3)
    """
    require_root(p, root, "scatter")

    def steps() -> Iterator[Step]:
        for distance in (1 << k for k in reversed(range((p - 1).bit_length()))):
            src = np.arange(0, p - distance, 2 * distance)
            dst = src + distance
            yield wrapped(
                (src + root) % p, (dst + root) % p, dst + root, np.minimum(distance, p - dst), p
            )

    return Schedule("tree scatter", p, p, steps)


@lru_cache
def gather(p: int, root: int = 0) -> Schedule:
    """Copy chunk r from rank r to the root: `scatter` backwards.

    Cost: ceil(log2(p)) steps; at most half of the buffer sent per rank. With h the largest power of
    two below p, the busiest rank sends max(p - h, h // 2)/p of it.

    >>> print(gather(4))
    tree gather: 4 ranks, 4 chunks
      0  copy  1->0 [1:2)  3->2 [3:4)
      1  copy  2->0 [2:4)
    """
    return backwards(scatter(p, root), COPY, "tree gather")


@lru_cache
def broadcast_in_parts(p: int, root: int = 0) -> Schedule:
    """Copy the root's buffer to all: a tree scatters it, a ring gathers it (van de Geijn).

    For long buffers. Cost: ceil(log2(p)) + p - 1 steps; the root sends 2(p - 1)/p of the buffer.

    >>> print(broadcast_in_parts(2))
    scatter-gather broadcast: 2 ranks, 2 chunks
      0  copy  0->1 [1:2)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    return scatter(p, root).then(ring.all_gather(p), "scatter-gather broadcast")


@lru_cache
def reduce_in_parts(p: int, root: int = 0) -> Schedule:
    """Sum all ranks' buffers at the root: a ring sums a part at each rank, a tree gathers them.

    Cost: p - 1 + ceil(log2(p)) steps. The busiest rank sends at most 3/2 of the buffer: (p - 1)/p,
    and what `gather` sends.

    >>> print(reduce_in_parts(2))
    scatter-gather reduce: 2 ranks, 2 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  copy  1->0 [1:2)
    """
    return ring.reduce_scatter(p).then(gather(p, root), "scatter-gather reduce")


def _busiest(p: int) -> int:
    """Return the chunks that the busiest rank of p sends towards the root."""
    half = 1 << max(0, doublings(p) - 1)
    return max(p - half, half // 2)


REGISTERED = (
    Registration("broadcast", "tree", broadcast, doublings, sent=doublings),
    Registration(
        "broadcast",
        "scatter_gather",
        broadcast_in_parts,
        steps=lambda p: doublings(p) + p - 1,
        sent=twice_all_but_one,
    ),
    Registration("reduce", "tree", reduce, doublings, sent=lambda _: 1),
    Registration(
        "reduce",
        "scatter_gather",
        reduce_in_parts,
        steps=lambda p: p - 1 + doublings(p),
        sent=lambda p: Fraction(p - 1 + _busiest(p), p),
    ),
    Registration("gather", "tree", gather, doublings, sent=lambda p: Fraction(_busiest(p), p)),
    Registration("scatter", "tree", scatter, doublings, sent=all_but_one),
)
