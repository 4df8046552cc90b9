# SPDX-License-Identifier: Apache-2.0
"""The clock of all deadlines in a process. Tests put one that they move in its place.

A wait asks `now_s` for the time, and `slice_s` how long it may sleep before it asks again. So a test of a deadline
waits for nothing (`tests/support/moved_clock.py`). Waits inside torch's stores and Gloo keep the time of the machine.
"""

from __future__ import annotations

from time import monotonic

__all__ = ["Clock", "now_s", "slice_s", "use"]


class Clock:
    """What tells deadlines the time: the machine's clock, or one of a subclass. Called from any thread."""

    now_s = staticmethod(monotonic)

    def slice_s(self, left_s: float) -> float:
        """See the function `slice_s`."""
        return max(left_s, 0.0)


_clock = Clock()


def now_s() -> float:
    """Return the seconds that deadlines count, since some fixed moment."""
    return _clock.now_s()


def slice_s(left_s: float) -> float:
    """Return how many real seconds a wait that has `left_s` may sleep before it asks for the time again."""
    return _clock.slice_s(left_s)


def use(clock: Clock) -> Clock:
    """Let all deadlines of this process read `clock` from now on, and return the one that they read before."""
    global _clock  # the one state of this module
    before, _clock = _clock, clock
    return before
