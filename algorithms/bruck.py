# SPDX-License-Identifier: Apache-2.0
"""Bruck's pattern: all-gather, reduce-scatter and barrier in ceil(log2(p)) steps, for any p.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from commrt.algorithms.parts import backwards, wrapped
from commrt.algorithms.registration import Registration, all_but_one, doublings
from commrt.schedule import ADD, Schedule, Step


@lru_cache
def all_gather(p: int) -> Schedule:
    """Copy chunk r from rank r to all: in step k rank r sends chunks r to r + 2^k - 1 to r - 2^k.

    Cost: ceil(log2(p)) steps; (p - 1)/p of the buffer sent per rank.

    >>> print(all_gather(3))
    bruck all-gather: 3 ranks, 3 chunks
      0  copy  0->2 [0:1)  1->0 [1:2)  2->1 [2:3)
      1  copy  0->1 [0:1)  1->2 [1:2)  2->0 [2:3)
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for held in (1 << k for k in range((p - 1).bit_length())):
            yield wrapped(rank, (rank - held) % p, rank, np.full(p, min(held, p - held)), p)

    return Schedule("bruck all-gather", p, p, steps)


@lru_cache
def reduce_scatter(p: int) -> Schedule:
    """Sum chunk r over all ranks at rank r: `all_gather` backwards.

    Cost: ceil(log2(p)) steps; (p - 1)/p of the buffer sent per rank.

    >>> print(reduce_scatter(3))
    bruck reduce-scatter: 3 ranks, 3 chunks
      0  add  1->0 [0:1)  2->1 [1:2)  0->2 [2:3)
      1  add  2->0 [0:1)  0->1 [1:2)  1->2 [2:3)
    """
    return backwards(all_gather(p), ADD, "bruck reduce-scatter")


@lru_cache
def barrier(p: int) -> Schedule:
    """Let all ranks know that all have come: `all_gather` brings chunk r, rank r's token, to all.

    Cost: ceil(log2(p)) steps; p - 1 tokens sent per rank.
    """
    return all_gather(p).named("dissemination")


REGISTERED = (
    Registration("all_gather", "bruck", all_gather, doublings, all_but_one),
    Registration("reduce_scatter", "bruck", reduce_scatter, doublings, all_but_one),
    Registration("barrier", "dissemination", barrier, doublings, all_but_one),
)
