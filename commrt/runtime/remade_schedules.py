# SPDX-License-Identifier: Apache-2.0
"""Notices a schedule that is made anew in each step, and logs that once, on one rank.

Whoever prepares schedules asks it about each one that is new, on one thread at a time.
"""

from __future__ import annotations

import logging

from commrt.schedule import Schedule

_log = logging.getLogger("commrt")


class RemadeSchedules:
    """Compares each schedule that is new with the one before it."""

    def __init__(self) -> None:
        self._last: Schedule | None = None
        self._has_told = False

    def see(self, schedule: Schedule, maker: object, *, tells: bool) -> None:
        """Log, if this rank `tells`, that `maker` made the latest schedule once more."""
        last = self._last
        self._last = schedule
        if last is None or last is schedule or self._has_told or not tells:
            return
        if last.name == schedule.name and last.digest() == schedule.digest():
            self._has_told = True
            _log.warning(
                "commrt: %s makes the schedule %s anew: each object is prepared again, which slows"
                " every step; return the same one, by functools.lru_cache",
                maker,
                schedule.name,
            )
