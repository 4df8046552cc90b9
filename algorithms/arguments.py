# SPDX-License-Identifier: Apache-2.0
"""Checks of what users give to algorithms: a root, a whole number, an object that makes schedules.

They raise, and change nothing. Ways to train in other rooms check their arguments by them too.
"""

from __future__ import annotations

from inspect import signature
from typing import cast

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.schedule import Schedule


def require_root(p: int, root: int, what: str) -> None:
    """Raise `UsageError` unless `root` is one of `p` ranks."""
    if not 0 <= root < p:
        raise UsageError(
            f"rank {root} cannot be the root of a {what} over {p} ranks: choose one of 0..{p - 1}"
        )


def require_whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise `UsageError` unless `value` is a whole number in range."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limit = "on" if most is None else f"to {most:,}"
        raise UsageError(f"{name}={value!r:.80}: give a whole number from {least} {limit}")


def require_step_and_ranks(step: object, ranks: object) -> None:
    """Raise `UsageError` unless ``schedule(step, ranks)`` of an algorithm can mean anything."""
    # whole numbers pass without a call: each step comes here
    if type(step) is not int or step < 0:
        require_whole("step", step, 0)
    if type(ranks) is not int or ranks < 1:
        require_whole("ranks", ranks)


def as_algorithm(value: object) -> Algorithm:
    """Return `value`, or the algorithm that is called so (`catalogue.by_name`).

    Raises `UsageError` for an unknown name, and for what makes no schedules.

    >>> as_algorithm("ring")
    Ring()
    """
    if isinstance(value, str):
        from commrt.algorithms.catalogue import by_name  # noqa: PLC0415  # imports all of them

        return by_name(value)
    require_maker("algorithm", value)
    return cast("Algorithm", value)


def require_maker(name: str, value: object) -> None:
    """Raise `UsageError` unless `value` is an object that makes schedules."""
    if isinstance(value, Schedule):
        raise UsageError(
            f"{name}=the schedule {value.name}: wrap it in an object whose method schedule(self,"
            " step, ranks) returns it"
        )
    if isinstance(value, type) or not callable(getattr(value, "schedule", None)):
        raise UsageError(
            f"{name}={value!r:.80} makes no schedules: pass an object, such as commrt.Ring()"
        )


def require_inner(value: object) -> None:
    """Raise `UsageError` unless ``inner=value`` makes schedules of a step and a number of ranks."""
    require_maker("inner", value)
    _require_parameters(cast("Algorithm", value))


def _require_parameters(algorithm: Algorithm) -> None:
    """Raise `UsageError` unless the method `schedule` takes step and ranks."""
    try:
        taken = signature(algorithm.schedule)
    except ValueError:  # of a builtin, which need not have one
        return
    try:
        taken.bind(0, 1)
    except TypeError as error:
        raise UsageError(
            f"{algorithm!r:.80} has schedule{taken}: give it the signature schedule(self, step,"
            " ranks)"
        ) from error


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if not of `ranks`."""
    try:
        schedule = algorithm.schedule(step, ranks)
    except TypeError:
        _require_parameters(algorithm)
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
