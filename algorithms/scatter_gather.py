# SPDX-License-Identifier: Apache-2.0
"""Broadcast and reduce of long buffers as two collectives each: every rank handles one part of the buffer.

Van de Geijn's broadcast, and its counterpart; Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from functools import lru_cache

from commrt.algorithms import ring, tree
from commrt.schedule import Schedule

__all__ = ["broadcast", "reduce"]


@lru_cache
def broadcast(p: int, root: int = 0) -> Schedule:
    """Copy the root's buffer to all ranks: a tree scatters it, a ring gathers it.

    Cost: ceil(log2(p)) + p - 1 steps; the root sends 2(p - 1)/p of the buffer.

    >>> print(broadcast(2))
    scatter-gather broadcast: 2 ranks, 2 chunks
      0  copy  0->1 [1:2)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    return tree.scatter(p, root).then(ring.all_gather(p), "scatter-gather broadcast")


@lru_cache
def reduce(p: int, root: int = 0) -> Schedule:
    """Sum all ranks' buffers at the root: a ring sums them, one part at each rank, and a tree gathers the parts.

    Cost: p - 1 + ceil(log2(p)) steps. The busiest rank sends at most 3/2 of the buffer: (p - 1)/p, and what
    `tree.gather` sends.

    >>> print(reduce(2))
    scatter-gather reduce: 2 ranks, 2 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  copy  1->0 [1:2)
    """
    return ring.reduce_scatter(p).then(tree.gather(p, root), "scatter-gather reduce")
