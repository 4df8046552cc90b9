# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA graphs: what a thread asks its device is noted while it records, and asked again by a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Graph", "ask", "record", "recording"]


class Graph:
    """Calls in their order, with their arguments as they were."""

    def __init__(self) -> None:
        self.replays = 0
        self._calls: list[Callable[[], None]] = []
        self._on_reset: list[Callable[[], None]] = []

    def note(self, call: Callable[[], None]) -> None:
        """Ask it in every replay."""
        self._calls.append(call)

    def on_reset(self, call: Callable[[], None]) -> None:
        """Tell somebody when this is forgotten."""
        self._on_reset.append(call)

    def replay(self) -> None:
        """Ask everything again."""
        self.replays += 1
        for call in self._calls:
            call()

    def reset(self) -> None:
        """Forget everything."""
        tell, self._on_reset, self._calls = self._on_reset, [], []
        for call in tell:
            call()


class _Thread(threading.local):
    graph: Graph | None = None


_thread = _Thread()


def recording() -> Graph | None:
    """What the calling thread records to."""
    return _thread.graph


def ask(call: Callable[[], None]) -> None:
    """Ask the device now, or in every replay if the thread records."""
    if _thread.graph is None:
        call()
    else:
        _thread.graph.note(call)


def record(work: Callable[[], None]) -> Graph:
    """What `work` asks, which the device does not do yet; host code in between runs now, and only once."""
    graph = _thread.graph = Graph()
    try:
        work()
    except BaseException:
        graph.reset()
        raise
    finally:
        _thread.graph = None
    return graph
