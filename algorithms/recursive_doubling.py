# SPDX-License-Identifier: Apache-2.0
"""Recursive doubling: an all-reduce of whole buffers in log2(p) steps, for short ones.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005. From step to step the distance of the partner doubles, and so does the number of ranks whose
buffers are added up.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commrt.algorithms.arguments import require_step_and_ranks
from commrt.algorithms.parts import folded
from commrt.algorithms.registration import Registration, is_power_of_two
from commrt.schedule import ADD, Schedule, Step


@lru_cache
def all_reduce(p: int) -> Schedule:
    """Sum over all ranks at every rank: in step k with the rank whose number differs in bit k.

    All ranks get the same bits, because a + b and b + a are equal. Ranks beyond the largest power
    of two are folded in.

    Cost: log2(p) steps, each sending the buffer, for a power of two; otherwise 2 steps more, and
    one buffer more at the busiest rank.

    >>> print(all_reduce(4))
    doubling: 4 ranks, 1 chunk
      0  add  0->1 [0:1)  1->0 [0:1)  2->3 [0:1)  3->2 [0:1)
      1  add  0->2 [0:1)  1->3 [0:1)  2->0 [0:1)  3->1 [0:1)
    """
    digits = p.bit_length() - 1

    def steps() -> Iterator[Step]:
        rank = np.arange(1 << digits)
        for k in range(digits):
            yield Step.of(src=rank, dst=rank ^ (1 << k), lo=0, hi=1, combine=ADD)

    return folded(Schedule("doubling", 1 << digits, 1, steps), p)


@dataclass(frozen=True, slots=True)
class RecursiveDoubling:
    """All-reduce by recursive doubling; see `all_reduce`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return `all_reduce`, whatever the step."""
        require_step_and_ranks(step, ranks)
        return all_reduce(ranks)


REGISTERED = (
    Registration(
        "all_reduce",
        "doubling",
        all_reduce,
        steps=lambda p: p.bit_length() - 1 + 2 * (not is_power_of_two(p)),
        sent=lambda p: p.bit_length() - 1 + (not is_power_of_two(p)),
        algorithm=RecursiveDoubling,
    ),
)
