# SPDX-License-Identifier: Apache-2.0
"""Folding: an all-reduce for any rank count from one that takes only some rank counts.

The extra ranks send their buffers to core ranks in one step before the core's schedule, and receive the result in one
step after it. Each extra rank has several core ranks as helpers, a slice of the buffer each, so that no core rank
receives a whole second buffer.
"""

from __future__ import annotations

import numpy as np

from commrt.errors import ScheduleError
from commrt.schedule import ADD, COPY, Schedule, Step

__all__ = ["MAX_HELPERS", "folded"]

MAX_HELPERS = 8
"""Most helpers per extra rank: NCCL runs up to 8 point-to-point operations of a group in one batch."""


def folded(core: Schedule, ranks: int) -> Schedule:
    """Return an all-reduce on `ranks` ranks, made of `core`, an all-reduce on the first ``core.ranks`` of them.

    Raises `ScheduleError` unless ``core.ranks <= ranks <= 2 * core.ranks``: each extra rank needs a helper.
    Cost: 2 steps more than `core`; an extra rank sends 1 buffer, a helper one slice of it more than in `core`.

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
            f"{core.name} on {core.ranks} ranks cannot be folded onto {ranks}: each extra rank needs a core rank of "
            f"its own, so fold onto {core.ranks}..{2 * core.ranks} ranks"
        )
    extra, helper, lo, hi = _slices(core.ranks, ranks - core.ranks, core.chunks)
    into, back = Step.of(extra, helper, lo, hi, ADD), Step.of(helper, extra, lo, hi, COPY)
    before = Schedule("fold", ranks, core.chunks, lambda: iter([into]))
    after = Schedule("unfold", ranks, core.chunks, lambda: iter([back]))
    return before.then(core.over(range(core.ranks), world=ranks)).then(after, core.name)


def _slices(core: int, extras: int, chunks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return columns (extra, helper, lo, hi): the helpers of extra rank i are core ranks h with h % extras == i."""
    rows: list[tuple[int, int, int, int]] = []
    for i in range(extras):
        helpers = range(i, core, extras)[: min(MAX_HELPERS, chunks)]
        bounds = [chunks * k // len(helpers) for k in range(len(helpers) + 1)]
        rows += [(core + i, h, lo, hi) for h, lo, hi in zip(helpers, bounds, bounds[1:], strict=False)]
    extra, helper, lo, hi = np.array(rows, dtype=np.int64).T
    return extra, helper, lo, hi
