# SPDX-License-Identifier: Apache-2.0
"""Parts that several collectives share: a schedule backwards, ranges of chunks that wrap around, checked roots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commrt.errors import UsageError
from commrt.schedule import COPY, Combine, IntArray, Schedule, Step

__all__ = ["backwards", "require_root", "two_levels", "wrapped"]


def backwards(schedule: Schedule, combine: Combine, name: str | None = None) -> Schedule:
    """Return `schedule` with its steps in reverse order, senders and receivers exchanged, all combining by `combine`.

    With ADD, a broadcast becomes a reduce, and an all-gather becomes a reduce-scatter. With COPY, a scatter becomes a
    gather. The result is right only if `schedule` brings each chunk to each rank once; `verify` refuses it otherwise.

    >>> from commrt.schedule import ADD
    >>> push = Schedule("push", 3, 1, lambda: iter([Step.of(0, 1, 0, 1, COPY), Step.of(1, 2, 0, 1, COPY)]))
    >>> print(backwards(push, ADD, "pull"))
    pull: 3 ranks, 1 chunk
      0  add  2->1 [0:1)
      1  add  1->0 [0:1)
    """

    def steps() -> Iterator[Step]:
        for step in reversed(tuple(schedule.steps())):
            yield Step.of(src=step.dst, dst=step.src, lo=step.lo, hi=step.hi, combine=combine)

    return Schedule(name or f"{schedule.name} backwards", schedule.ranks, schedule.chunks, steps)


def wrapped(src: IntArray, dst: IntArray, first: IntArray, count: IntArray, p: int) -> Step:
    """Return a step that copies chunks ``first, first + 1, ...`` modulo `p`, `count` of them, from `src` to `dst`.

    A range that passes chunk p - 1 becomes two transfers. `count` is at most `p`.

    >>> print(wrapped(src=np.array([2]), dst=np.array([0]), first=np.array([2]), count=np.array([2]), p=3))
    copy  2->0 [2:3)  2->0 [0:1)
    """
    lo = first % p
    hi = lo + count
    over = np.flatnonzero(hi > p)
    return Step.of(
        src=np.concatenate((src, src[over])),
        dst=np.concatenate((dst, dst[over])),
        lo=np.concatenate((lo, 0 * over)),
        hi=np.concatenate((np.minimum(hi, p), hi[over] - p)),
        combine=COPY,
    )


def two_levels(scatter: Schedule, between: Schedule, gather: Schedule, name: str) -> Schedule:
    """Return an all-reduce over a grid: `scatter` along rows, `between` along columns, `gather` along rows.

    `scatter` is a reduce-scatter and `gather` an all-gather over the X ranks of a row, `between` an all-reduce over the
    Y ranks of a column. Rank r is in column ``r % X`` of row ``r // X``.
    """
    x, y, own = scatter.ranks, between.ranks, between.chunks
    p, chunks = x * y, x * own
    rank = np.arange(p).reshape(y, x)
    columns = between.within(0, own, chunks).over(rank.T, p, shift=own * np.arange(x))
    return scatter.refined(own).over(rank, p).then(columns).then(gather.refined(own).over(rank, p), name)


def require_root(p: int, root: int, what: str) -> None:
    """Raise `UsageError` unless `root` is one of `p` ranks."""
    if not 0 <= root < p:
        raise UsageError(f"rank {root} cannot be the root of a {what} over {p} ranks: choose one of 0..{p - 1}")
