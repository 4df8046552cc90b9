# SPDX-License-Identifier: Apache-2.0
"""The chain: broadcast and reduce from rank to rank, several slices of the buffer at once.

A long buffer needs hardly more time than one transfer of it, however many ranks there are.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from commrt.algorithms.arguments import require_root
from commrt.algorithms.parts import backwards
from commrt.algorithms.registration import Registration
from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, Schedule, Step


@lru_cache
def broadcast(p: int, root: int = 0, slices: int | None = None) -> Schedule:
    """Copy the root's buffer to all along root, root + 1, ... modulo p, in `slices` equal parts.

    Cost: p - 2 + slices steps, in each of which a rank sends one slice; the buffer sent per rank.
    None makes 4p - 7 slices (1 for less than two ranks): then the steps together carry at most 5/4
    of the buffer.

    >>> print(broadcast(3, slices=3))
    chain broadcast: 3 ranks, 3 chunks
      0  copy  0->1 [0:1)
      1  copy  0->1 [1:2)  1->2 [0:1)
      2  copy  0->1 [2:3)  1->2 [1:2)
      3  copy  1->2 [2:3)
    """
    require_root(p, root, "broadcast")
    parts = max(1, 4 * p - 7) if slices is None else slices
    if parts < 1:
        raise UsageError(f"slices={slices}: a buffer is cut into 1, 2, ... slices")

    def steps() -> Iterator[Step]:
        for number in range(p - 2 + parts if p > 1 else 0):
            place = np.arange(max(0, number - parts + 1), min(p - 1, number + 1))
            part = number - place
            yield Step.of(
                src=(root + place) % p,
                dst=(root + place + 1) % p,
                lo=part,
                hi=part + 1,
                combine=COPY,
            )

    return Schedule("chain broadcast", p, parts, steps)


@lru_cache
def reduce(p: int, root: int = 0, slices: int | None = None) -> Schedule:
    """Sum all ranks' buffers at the root: `broadcast` backwards.

    Cost: p - 2 + slices steps; each rank but the root sends the buffer once.

    >>> print(reduce(3, slices=2))
    chain reduce: 3 ranks, 2 chunks
      0  add  2->1 [1:2)
      1  add  1->0 [1:2)  2->1 [0:1)
      2  add  1->0 [0:1)
    """
    return backwards(broadcast(p, root, slices), ADD, "chain reduce")


def _steps(p: int) -> int:
    return p - 2 + 4 * p - 7


REGISTERED = (
    Registration("broadcast", "chain", broadcast, _steps, sent=lambda _: 1),
    Registration("reduce", "chain", reduce, _steps, sent=lambda _: 1),
)
