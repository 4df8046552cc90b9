# SPDX-License-Identifier: Apache-2.0
"""The graphs of one communicator, which waits for them when it is freed: they go first."""

from __future__ import annotations

import weakref
from contextlib import suppress

from commrt.threads.streams import Graph
from commrt.transport.protocol import Exchange

__all__ = ["Graphs"]


class Graphs:
    """Each kept until nobody can replay it any more."""

    def __init__(self) -> None:
        self._kept: list[Graph] = []

    def keep(self, graph: Graph, replays: Exchange) -> None:
        """As long as `replays` lives, which does so."""
        self._kept.append(graph)
        weakref.finalize(replays, self._drop, graph)

    def _drop(self, graph: Graph) -> None:
        with suppress(ValueError):  # all have been dropped
            self._kept.remove(graph)
            graph.reset()

    def drop_all(self) -> None:
        """None may be replayed from here on."""
        while self._kept:
            self._kept.pop().reset()
