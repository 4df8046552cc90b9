# SPDX-License-Identifier: Apache-2.0
"""How long waits may take: all follows from one number; a pause of this process hardly counts.

All deadlines of a process read one `clock`, which tests move. A wait asks it for the time, and
sleeps at most its `slice_s` before it asks again. So a test of a deadline waits for nothing
(`tests/support/moved_clock.py`). Waits inside torch's stores and Gloo keep the time of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import NamedTuple

from commrt.errors import UsageError

DEFAULT_TIMEOUT_S = 300.0
LONGEST_TIMEOUT_S = 2e6
"""Sockets count milliseconds in 32 bits."""
PROBE_S = 2.0
"""The most that a probe takes, since hosts that can be reached answer sooner."""
PARTS = 4
"""A pause counts as one part of the limit at most, so peers can answer after it wakes up."""


class Clock:
    """What tells all deadlines of a process the time.

    Read from any thread; only a test sets its attributes.
    """

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = monotonic
        """Return the seconds that deadlines count, since some fixed moment."""
        self.slice_s = inf
        """The most real seconds that a wait sleeps before it asks for the time again."""


clock = Clock()


class Timeouts(NamedTuple):
    """The limits of waits for other ranks.

    Each is below the next (a start may equal a collective), so of two waits the inner ends first.
    """

    probe_s: float  # whether a process lives, or a rank has a state
    # a step that keeps ranks in a collective waiting; each pause while a state is copied
    step_s: float
    # all other waits, as for a transfer or for ranks to say they live: the number that a user gives
    collective_s: float
    start_s: float  # until all ranks have connected

    @classmethod
    def of(cls, timeout_s: float, start_timeout_s: float | None = None) -> Timeouts:
        """Return the limits for `timeout_s`; raise `UsageError` for a start that may take less."""
        start_s = (
            max(2 * timeout_s, DEFAULT_TIMEOUT_S) if start_timeout_s is None else start_timeout_s
        )
        if start_s < timeout_s:
            raise UsageError(
                f"start_timeout_s={start_s:g} is below timeout_s={timeout_s:g}: a rank that starts"
                " again could give up before the others notice that it was lost; raise the first,"
                " or lower the second (COMMRT_TIMEOUT_S)"
            )
        return cls(
            min(PROBE_S, timeout_s / PARTS),
            timeout_s / 2,
            timeout_s,
            min(start_s, LONGEST_TIMEOUT_S),
        )

    def __str__(self) -> str:
        return "probe {:g} s < step {:g} s < collective {:g} s <= start {:g} s".format(*self)


def require_deadlines(**limits: float | None) -> None:
    """Raise `UsageError` for a limit, by name in seconds, that is given and is no deadline."""
    for name, limit in limits.items():
        is_number = isinstance(limit, int | float | None) and not isinstance(limit, bool)
        if not is_number or (limit is not None and not 0 < limit <= LONGEST_TIMEOUT_S):
            raise UsageError(
                f"{name}={limit!r:.80} is no deadline: give seconds, above 0 and up to 2,000,000"
            )


class Deadline:
    """Counts how long this process has waited, against `limit_s`.

    Belongs to one thread, which polls it often. If the process is stopped between two polls
    (SIGSTOP, a suspended machine), only `poll_s` of the pause counts. Give `between_s` if the work
    between two polls may itself take that long.
    """

    def __init__(self, limit_s: float, between_s: float = 0.0) -> None:
        self.poll_s = max(limit_s / PARTS, between_s)
        """The longest time that counts between two polls; poll at least this often."""
        self._limit_s = limit_s
        self._waited_s = 0.0
        self._polled_s = clock.now_s()

    @property
    def waited_s(self) -> float:
        """Seconds waited so far. Reading it is a poll."""
        time_s = clock.now_s()
        self._waited_s += min(time_s - self._polled_s, self.poll_s)
        self._polled_s = time_s
        return self._waited_s

    @property
    def left_s(self) -> float:
        """Seconds left of the limit; 0 or less if it is over. Reading it is a poll."""
        return self._limit_s - self.waited_s
