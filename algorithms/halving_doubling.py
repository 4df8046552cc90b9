# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling: as many bytes as a ring in a logarithmic number of steps.

Rabenseifner; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations
in MPICH", 2005. From step to step the amount halves and the distance doubles, and then back: most
bytes go to the nearest rank. Halving alone is a reduce-scatter, and doubling alone an all-gather.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commrt.algorithms.arguments import require_step_and_ranks
from commrt.algorithms.parts import backwards, folded
from commrt.algorithms.registration import (
    Registration,
    Shape,
    all_but_one,
    doublings,
    is_power_of_two,
)
from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, Schedule, Step


@lru_cache
def all_gather(p: int) -> Schedule:
    """Copy chunk r from rank r to all ranks; raises `UsageError` unless `p` is a power of two.

    Cost: log2(p) steps; (p - 1)/p of the buffer sent per rank.
    """
    if p < 1 or p & (p - 1):
        raise UsageError(
            f"halving and doubling take 1, 2, 4, 8, ... ranks, not {p}; a ring takes any number"
        )

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for distance in (1 << k for k in range(p.bit_length() - 1)):
            lo = rank & -distance
            yield Step.of(src=rank, dst=rank ^ distance, lo=lo, hi=lo + distance, combine=COPY)

    return Schedule("recursive doubling", p, p, steps)


@lru_cache
def reduce_scatter(p: int) -> Schedule:
    """Sum chunk r over all ranks at rank r: `all_gather` backwards.

    Cost: log2(p) steps; (p - 1)/p of the buffer sent per rank.
    """
    return backwards(all_gather(p), ADD, "recursive halving")


@lru_cache
def all_reduce(p: int) -> Schedule:
    """Sum over all ranks at every rank; ranks beyond the largest power of two are folded in.

    Cost: 2 log2(p) steps and 2(p - 1)/p of the buffer for a power of two; otherwise 2 steps more,
    and up to 3 buffers at the busiest rank. With hosts of g ranks, 2(p - g)/p of the buffer leaves
    each host (powers of two).

    >>> print(all_reduce(4))
    halving-doubling: 4 ranks, 4 chunks
      0  add  1->0 [0:2)  3->2 [0:2)  0->1 [2:4)  2->3 [2:4)
      1  add  2->0 [0:1)  0->2 [1:2)  3->1 [2:3)  1->3 [3:4)
      2  copy  0->2 [0:1)  2->0 [1:2)  1->3 [2:3)  3->1 [3:4)
      3  copy  0->1 [0:2)  2->3 [0:2)  1->0 [2:4)  3->2 [2:4)
    """
    core = 1 << (p.bit_length() - 1)
    return folded(
        reduce_scatter(core).then(all_gather(core), "halving-doubling").over(_mirrored(core)), p
    )


def _mirrored(p: int) -> list[int]:
    """Return each rank with its bits reversed, so that the largest messages go to neighbours.

    >>> _mirrored(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    digits = p.bit_length() - 1
    return [int(f"{rank:0{digits}b}"[::-1], 2) if digits else 0 for rank in range(p)]


@dataclass(frozen=True, slots=True)
class HalvingDoubling:
    """All-reduce by recursive halving and doubling; see `all_reduce`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return `all_reduce`, whatever the step."""
        require_step_and_ranks(step, ranks)
        return all_reduce(ranks)


REGISTERED = (
    Registration("all_gather", "doubling", all_gather, doublings, all_but_one),
    Registration("reduce_scatter", "halving", reduce_scatter, doublings, all_but_one),
    Registration(
        "all_reduce",
        "halving_doubling",
        all_reduce,
        steps=lambda p: 2 * (p.bit_length() - 1) + 2 * (not is_power_of_two(p)),
        sent=lambda _: 3,
        is_limit=True,  # reached where ranks are folded in
        algorithm=HalvingDoubling,
        shapes=lambda _: [Shape(HalvingDoubling())],
    ),
)
