# SPDX-License-Identifier: Apache-2.0
"""The schedule of a training step, as an algorithm makes it; refused if it is none of these ranks.

Keeps nothing, for any thread.
"""

from __future__ import annotations

from inspect import signature

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.schedule import Schedule


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if not of `ranks`."""
    try:
        schedule = algorithm.schedule(step, ranks)
    except TypeError as error:
        _require_parameters(algorithm, error)
        raise
    if not isinstance(schedule, Schedule):
        raise UsageError(
            f"{algorithm}: schedule({step}, {ranks}) returned {schedule!r:.80}: return a"
            f" commrt.Schedule of {ranks} ranks"
        )
    if schedule.ranks != ranks:
        raise UsageError(
            f"{algorithm} made the schedule {schedule.name} of {schedule.ranks} ranks for a world"
            f" of {ranks}: raise UsageError there, or make one for any number of ranks"
        )
    return schedule


def _require_parameters(algorithm: Algorithm, error: TypeError) -> None:
    """Raise `UsageError` if `error` is that of a method that does not take step and ranks."""
    taken = signature(algorithm.schedule)
    try:
        taken.bind(0, 1)
    except TypeError:
        raise UsageError(
            f"{algorithm} has schedule{taken}: give it the signature schedule(self, step, ranks)"
        ) from error
