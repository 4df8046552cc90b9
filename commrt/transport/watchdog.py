# SPDX-License-Identifier: Apache-2.0
"""A thread that looks again and again, as long as somebody keeps what it looks after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakMethod

__all__ = ["POLL_S", "Watchdog"]

POLL_S = 0.05
"""Between two looks."""


class Watchdog:
    """Calls the method `look` every `POLL_S` seconds until `stop`, or until its object is gone; first `begin`, once."""

    def __init__(self, look: Callable[[], None], begin: Callable[[], None]) -> None:
        self._look, self._begin = WeakMethod(look), begin
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="commrt-watchdog", daemon=True).start()

    def _watch(self) -> None:
        self._begin()
        while not self._stopped.wait(POLL_S):
            look = self._look()
            if look is None:
                return
            look()
            del look  # or it lives until the next time

    def stop(self) -> None:
        """Look no more; a look that has begun may go on."""
        self._stopped.set()
