# SPDX-License-Identifier: Apache-2.0
"""The pairwise all-to-all: in each step every rank sends to one rank and receives from one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from commrt.schedule import COPY, Schedule, Step

__all__ = ["all_to_all"]


@lru_cache
def all_to_all(p: int) -> Schedule:
    """Copy chunk s * p + d from rank s to rank d, for all s and d: in step k rank r sends to rank r + k, modulo p.

    Cost: p - 1 steps; a rank sends one of the p * p chunks in each.

    >>> print(all_to_all(3))
    pairwise all-to-all: 3 ranks, 9 chunks
      0  copy  0->1 [1:2)  1->2 [5:6)  2->0 [6:7)
      1  copy  0->2 [2:3)  1->0 [3:4)  2->1 [7:8)
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for distance in range(1, p):
            to = (rank + distance) % p
            yield Step.of(src=rank, dst=to, lo=rank * p + to, hi=rank * p + to + 1, combine=COPY)

    return Schedule("pairwise all-to-all", p, p * p, steps)
