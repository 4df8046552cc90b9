# SPDX-License-Identifier: Apache-2.0
"""How long a process has waited, as it sees it: while it is stopped itself, nobody is late."""

from __future__ import annotations

from time import monotonic

__all__ = ["Patience"]

PARTS = 4
"""Of a limit: a stop counts for no more than one of them, so what is left of it is time to answer."""


class Patience:
    """With something that has `limit_s`; who waits looks often, and says so by asking. For one thread.

    Where what is done between two looks may itself take `between_s`, that counts.
    """

    def __init__(self, limit_s: float, between_s: float = 0.0) -> None:
        self.most_s = max(limit_s / PARTS, between_s)
        """What counts at most between two looks."""
        self._limit_s, self._waited_s, self._looked_s = limit_s, 0.0, monotonic()

    def look(self) -> None:
        """Count the time since the latest look."""
        now_s = monotonic()
        self._waited_s += min(now_s - self._looked_s, self.most_s)
        self._looked_s = now_s

    @property
    def waited_s(self) -> float:
        """So far; a look."""
        self.look()
        return self._waited_s

    @property
    def left_s(self) -> float:
        """Of the limit; a look."""
        return self._limit_s - self.waited_s
