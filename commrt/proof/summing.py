# SPDX-License-Identifier: Apache-2.0
"""In how many steps of a schedule a sum grows: codes of few bits can carry only few such steps.

Pure functions of a schedule.
"""

from __future__ import annotations

from math import inf

import numpy as np

from commrt.errors import UsageError
from commrt.schedule import ADD, Schedule, require_valid

MOST_SUMMING_STEPS = 2
"""Steps in which a sum may grow: each codes it again, and the error grows with them."""


def require_short_sums(schedule: Schedule, wire: object) -> None:
    """Raise `UsageError` if `schedule` would quantize a sum of codes again and again."""
    if summing_steps(schedule, MOST_SUMMING_STEPS) > MOST_SUMMING_STEPS:
        raise UsageError(
            f"a wire of {wire} cannot carry {schedule.name}: codes do not add, and more than"
            f" {MOST_SUMMING_STEPS} steps add to a chunk, each of which may round its sums again;"
            " use commrt.Direct(), which sums in one (direct on the command line)"
        )


def summing_steps(schedule: Schedule, enough: float = inf) -> int:
    """Return the largest number of steps that add to the same chunk; stop counting above `enough`.

    >>> from commrt.algorithms import direct, ring
    >>> summing_steps(direct.all_reduce(8)), summing_steps(ring.all_reduce(8))
    (1, 7)
    """
    counts = np.zeros(schedule.chunks, dtype=np.int32)
    for step in schedule.checked_steps():
        adds = require_valid(step, schedule).rows(step.combine == ADD)
        begun, ended = (
            np.bincount(each, minlength=schedule.chunks + 1) for each in (adds.lo, adds.hi)
        )
        counts += np.cumsum(begun - ended)[:-1] > 0
        if counts.max() > enough:
            break
    return int(counts.max())
