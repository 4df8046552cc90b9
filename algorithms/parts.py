# SPDX-License-Identifier: Apache-2.0
"""Parts of several algorithms: schedules backwards, on two levels or folded, and chunks that wrap.

Pure functions of schedules and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commrt.errors import ScheduleError
from commrt.schedule import ADD, COPY, Combine, IntArray, Schedule, Step

MAX_HELPERS = 8
"""Most helpers per extra rank: NCCL batches up to 8 point-to-point operations of a group."""


def backwards(schedule: Schedule, combine: Combine, name: str | None = None) -> Schedule:
    """Return `schedule` in reverse: senders and receivers exchanged, all combining by `combine`.

    With ADD, a broadcast becomes a reduce, and an all-gather becomes a reduce-scatter. With COPY, a
    scatter becomes a gather. The result is right only if `schedule` brings each chunk to each rank
    once; `verify` refuses it otherwise.

    >>> from commrt.schedule import ADD
    >>> steps = [Step.of(0, 1, 0, 1, COPY), Step.of(1, 2, 0, 1, COPY)]
    >>> push = Schedule("push", 3, 1, lambda: iter(steps))
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
    """Return a step that copies `count` chunks from `first` on, modulo `p`, from `src` to `dst`.

    A range that passes chunk p - 1 becomes two transfers. `count` is at most `p`.

    >>> two = np.array([2])
    >>> print(wrapped(src=two, dst=np.array([0]), first=two, count=two, p=3))
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
    """Return a grid schedule: `scatter` along rows, `between` along columns, `gather` along rows.

    `scatter` is a reduce-scatter and `gather` an all-gather over the X ranks of a row, `between` an
    all-reduce or an exchange over the Y ranks of a column. Rank r is in column ``r % X`` of row
    ``r // X``.
    """
    x = scatter.ranks
    y = between.ranks
    own = between.chunks
    p = x * y
    chunks = x * own
    rank = np.arange(p).reshape(y, x)
    columns = between.within(0, own, chunks).over(rank.T, p, shift=own * np.arange(x))
    return (
        scatter.refined(own)
        .over(rank, p)
        .then(columns)
        .then(gather.refined(own).over(rank, p), name)
    )


def folded(core: Schedule, ranks: int) -> Schedule:
    """Return an all-reduce on `ranks` ranks made of `core`, one on the first ``core.ranks``.

    The extra ranks send their buffers to core ranks in one step before it, and receive the result
    in one step after it. Each has several core ranks as helpers, a slice of the buffer each, so
    that none receives a whole second buffer. Raises `ScheduleError` for fewer ranks than
    ``core.ranks``, and for more than twice as many: each extra rank needs a helper. Cost: 2 steps
    more than `core`; an extra rank sends 1 buffer, a helper one slice of it more than in `core`.

    >>> from commrt.algorithms import ring
    >>> print(folded(ring.all_reduce(2), 3))
    ring: 3 ranks, 2 chunks
      0  add  2->0 [0:1)  2->1 [1:2)
      1  add  0->1 [1:2)  1->0 [0:1)
      2  copy  0->1 [0:1)  1->0 [1:2)
      3  copy  0->2 [0:1)  1->2 [1:2)
    """
    if ranks == core.ranks:
        return core
    if not core.ranks <= ranks <= 2 * core.ranks:
        raise ScheduleError(
            f"{core.name} on {core.ranks} ranks cannot be folded onto {ranks}: each extra rank"
            f" needs a core rank of its own, so fold onto {core.ranks}..{2 * core.ranks} ranks"
        )
    extra, helper, lo, hi = _slices(core.ranks, ranks - core.ranks, core.chunks)
    into = Step.of(extra, helper, lo, hi, ADD)
    back = Step.of(helper, extra, lo, hi, COPY)
    before = Schedule("fold", ranks, core.chunks, lambda: iter([into]))
    after = Schedule("unfold", ranks, core.chunks, lambda: iter([back]))
    return before.then(core.over(range(core.ranks), world=ranks)).then(after, core.name)


def _slices(core: int, extras: int, chunks: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return columns (extra, helper, lo, hi): extra i has the core ranks h % extras == i."""
    rows: list[tuple[int, int, int, int]] = []
    for i in range(extras):
        helpers = range(i, core, extras)[: min(MAX_HELPERS, chunks)]
        bounds = [chunks * k // len(helpers) for k in range(len(helpers) + 1)]
        rows += [
            (core + i, h, lo, hi) for h, lo, hi in zip(helpers, bounds, bounds[1:], strict=False)
        ]
    extra, helper, lo, hi = np.array(rows, dtype=np.int64).T
    return extra, helper, lo, hi
