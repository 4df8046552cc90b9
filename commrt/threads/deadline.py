# SPDX-License-Identifier: Apache-2.0
"""Deadlines that do not blame others for the time in which this process itself was stopped."""

from __future__ import annotations

from commrt.threads.clock import now_s

__all__ = ["Deadline"]

PARTS = 4
"""A pause of this process counts as one part of the limit at most, so peers have time to answer after it wakes up."""


class Deadline:
    """Counts how long this process has waited, against `limit_s`. Belongs to one thread, which polls it often.

    If the process is stopped between two polls (SIGSTOP, a suspended machine), only `poll_s` of the pause counts. Give
    `between_s` if the work between two polls may itself take that long.
    """

    def __init__(self, limit_s: float, between_s: float = 0.0) -> None:
        self.poll_s = max(limit_s / PARTS, between_s)
        """The longest time that counts between two polls; poll at least this often."""
        self._limit_s, self._waited_s, self._polled_s = limit_s, 0.0, now_s()

    @property
    def waited_s(self) -> float:
        """Seconds waited so far. Reading it is a poll."""
        time_s = now_s()
        self._waited_s += min(time_s - self._polled_s, self.poll_s)
        self._polled_s = time_s
        return self._waited_s

    @property
    def left_s(self) -> float:
        """Seconds left of the limit; 0 or less if it is over. Reading it is a poll."""
        return self._limit_s - self.waited_s
