# SPDX-License-Identifier: Apache-2.0
"""The schedule of a training step, as an algorithm makes it; refused if it is none of these ranks.

Keeps nothing, for any thread.
"""

from __future__ import annotations

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.schedule import Schedule


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if not of `ranks`."""
    schedule = algorithm.schedule(step, ranks)
    if not isinstance(schedule, Schedule) or schedule.ranks != ranks:
        raise UsageError(
            f"{algorithm} made {schedule!r:.80} for {ranks} ranks, which is no schedule of them"
        )
    return schedule
