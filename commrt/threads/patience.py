# SPDX-License-Identifier: Apache-2.0
"""How long a process has waited, as it sees it: while it is stopped itself, nobody is late."""

from __future__ import annotations

from time import monotonic

__all__ = ["Patience"]

PARTS = 4
"""Of a limit: a stop counts for no more than one of them, so what is left of it is time to answer."""


class Patience:
    """With something that has `limit_s`; who waits looks often, and says so by asking. For one thread."""

    def __init__(self, limit_s: float) -> None:
        self.most_s = limit_s / PARTS
        """What counts at most between two looks."""
        self._limit_s, self._waited_s, self._looked_s = limit_s, 0.0, monotonic()

    @property
    def waited_s(self) -> float:
        """So far; a look."""
        now_s = monotonic()
        self._waited_s += min(now_s - self._looked_s, self.most_s)
        self._looked_s = now_s
        return self._waited_s

    @property
    def left_s(self) -> float:
        """Of the limit; a look."""
        return self._limit_s - self.waited_s
