# SPDX-License-Identifier: Apache-2.0
"""The ring: as few bytes as an all-reduce can send, in many steps.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commrt.schedule import ADD, COPY, Schedule, Step

__all__ = ["Ring", "all_gather", "all_reduce", "reduce_scatter"]


@lru_cache
def reduce_scatter(p: int) -> Schedule:
    """Sum chunk r over all ranks at rank r.

    Cost: p - 1 steps; (p - 1)/p of the buffer sent per rank.

    >>> print(reduce_scatter(3))
    ring reduce-scatter: 3 ranks, 3 chunks
      0  add  0->1 [2:3)  1->2 [0:1)  2->0 [1:2)
      1  add  0->1 [1:2)  1->2 [2:3)  2->0 [0:1)
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for s in range(p - 1):
            chunk = (rank - s - 1) % p
            yield Step.of(src=rank, dst=(rank + 1) % p, lo=chunk, hi=chunk + 1, combine=ADD)

    return Schedule("ring reduce-scatter", p, p, steps)


@lru_cache
def all_gather(p: int) -> Schedule:
    """Copy chunk r from rank r to all ranks.

    Cost: p - 1 steps; (p - 1)/p of the buffer sent per rank.
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for s in range(p - 1):
            chunk = (rank - s) % p
            yield Step.of(src=rank, dst=(rank + 1) % p, lo=chunk, hi=chunk + 1, combine=COPY)

    return Schedule("ring all-gather", p, p, steps)


@lru_cache
def all_reduce(p: int) -> Schedule:
    """Sum over all ranks at every rank.

    Cost: 2(p - 1) steps; 2(p - 1)/p of the buffer sent per rank.

    >>> print(all_reduce(2))
    ring: 2 ranks, 2 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    return reduce_scatter(p).then(all_gather(p), "ring")


@dataclass(frozen=True, slots=True)
class Ring:
    """All-reduce on one ring; see `all_reduce`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return `all_reduce`, whatever the step."""
        return all_reduce(ranks)
