# SPDX-License-Identifier: Apache-2.0
"""Tells the store once per second how a rank gets on, and a log who is late (``COMMRT_LIVE=1``).

On a thread of its own, which only reads the world; the first member logs. A step pays nothing.
"""

from __future__ import annotations

import json
import logging
import socket
from contextlib import suppress
from threading import Event
from time import time

from commrt.errors import CommrtError
from commrt.runtime.world import World
from commrt.store.client import call_store, clone_connection
from commrt.store.late import LateWatch
from commrt.store.live import PERIOD_S, Record, base_of, publish, read
from commrt.threads.starting import start_thread

_log = logging.getLogger("commrt").getChild("late")


def start_publishing(world: World) -> None:
    """Publish how `world` gets on until it ends."""
    start_thread(Publisher(world).work, f"commrt-live{world.rank}")


class Publisher:
    """One rank's records, and on the first member the findings; for one thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = clone_connection(base_of(world.store))
        self._host = socket.gethostname()
        self._number = 0
        self._since = (-1, 0.0)  # the number of steps, and when it was first seen
        self._watch = LateWatch()

    def work(self) -> None:
        """Publish once per second until the world ends, or its store does."""
        with suppress(CommrtError, RuntimeError):
            while not self._world.closed:
                self.publish()
                if self._world.rank == self._world.members[0]:
                    self.log_late()
                Event().wait(PERIOD_S)
            self.publish()

    def publish(self) -> None:
        """Write this rank's record."""
        now_s = time()
        trained = self._world.trained()
        if trained is None:
            return
        totals = trained.stats()
        if totals.steps != self._since[0]:
            self._since = (totals.steps, now_s)
        self._number += 1
        record = Record(
            self._world.rank,
            self._host,
            self._number,
            now_s,
            trained.step,
            totals.steps,
            self._since[1],
            totals.exposed_s,
            trained.waits_for,
            self._world.closed,
        )
        call_store(lambda: publish(self._store, record, self._world.size))

    def log_late(self) -> None:
        """Log a line of JSON for each rank that is late, the same one at most every 10 s."""
        now_s = time()
        found = self._watch.look(call_store(lambda: read(self._store)), now_s)
        for late in self._watch.news(found, now_s):
            _log.warning("%s", json.dumps(late._asdict()))
