# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA graphs: records the device calls of a thread, and repeats them in each replay."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["RecordedGraph", "ask", "record", "recording"]


class RecordedGraph:
    """Recorded calls, in order, with their arguments."""

    def __init__(self) -> None:
        self.replays = 0
        self._calls: list[Callable[[], None]] = []
        self._on_reset: list[Callable[[], None]] = []

    def note(self, call: Callable[[], None]) -> None:
        """Record `call`."""
        self._calls.append(call)

    def on_reset(self, call: Callable[[], None]) -> None:
        """Call `call` when the graph is reset."""
        self._on_reset.append(call)

    def replay(self) -> None:
        """Repeat all recorded calls."""
        self.replays += 1
        for call in self._calls:
            call()

    def reset(self) -> None:
        """Drop all recorded calls."""
        callbacks, self._on_reset, self._calls = self._on_reset, [], []
        for call in callbacks:
            call()


class _Thread(threading.local):
    graph: RecordedGraph | None = None


_thread = _Thread()


def recording() -> RecordedGraph | None:
    """Return the graph that the calling thread records to, or None."""
    return _thread.graph


def ask(call: Callable[[], None]) -> None:
    """Call `call` now, or in each replay if the thread records."""
    if _thread.graph is None:
        call()
    else:
        _thread.graph.note(call)


def record(work: Callable[[], None]) -> RecordedGraph:
    """Return a graph of the device calls of `work`, which are not run yet; its other code runs now, and only now."""
    graph = _thread.graph = RecordedGraph()
    try:
        work()
    except BaseException:
        graph.reset()
        raise
    finally:
        _thread.graph = None
    return graph
