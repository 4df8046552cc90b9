# SPDX-License-Identifier: Apache-2.0
"""Which algorithms carry codes of few bits: those whose sums grow over few steps, as each rounds them again."""

from __future__ import annotations

from itertools import islice
from math import inf

import numpy as np

from commrt.errors import UsageError
from commrt.quantization.adaptive import Adaptive
from commrt.quantizer import Quantizer
from commrt.schedule import ADD, Schedule

__all__ = ["require_short_sums", "summing_steps"]

MOST_SUMMING_STEPS = 2
"""Steps in which a sum may grow: each codes it again, and the error grows with them."""
MOST_CELLS = 1 << 24
"""Ranks x chunks that are followed one by one. Beyond, every step that adds counts."""


def require_short_sums(schedule: Schedule, wire: Quantizer | Adaptive) -> None:
    """Raise `UsageError` for a schedule in which a sum of codes would be quantized again and again."""
    if not _adds_in_more(schedule, MOST_SUMMING_STEPS):
        return
    is_large = schedule.ranks * schedule.chunks > MOST_CELLS
    if is_large or summing_steps(schedule, MOST_SUMMING_STEPS) > MOST_SUMMING_STEPS:
        raise UsageError(
            f"a wire of {wire} cannot carry {schedule.name}: codes do not add, and its sums grow over more than "
            f"{MOST_SUMMING_STEPS} steps, each of which would round them again; use commrt.Direct(), which sums in "
            "one (direct on the command line)"
        )


def summing_steps(schedule: Schedule, enough: float = inf) -> int:
    """Return over how many steps the longest sum of `schedule` grows; stop counting above `enough`.

    >>> from commrt.algorithms import direct, ring
    >>> summing_steps(direct.all_reduce(8)), summing_steps(ring.all_reduce(8))
    (1, 7)
    """
    grown = np.zeros((schedule.ranks, schedule.chunks), dtype=np.int32)
    for step in schedule.checked_steps():
        adds, before = step.rows(step.combine == ADD), grown.copy()
        for src, dst, lo, hi in zip(*(column.tolist() for column in adds.columns[:4]), strict=True):
            np.maximum(grown[dst, lo:hi], before[src, lo:hi] + 1, out=grown[dst, lo:hi])
        if grown.max(initial=0) > enough:
            break
    return int(grown.max(initial=0))


def _adds_in_more(schedule: Schedule, steps: int) -> bool:
    """Return True if more than `steps` steps add; otherwise no sum grows over more."""
    adding = (step for step in schedule.checked_steps() if (step.combine == ADD).any())
    return next(islice(adding, steps, None), None) is not None
