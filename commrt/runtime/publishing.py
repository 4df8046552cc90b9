# SPDX-License-Identifier: Apache-2.0
"""Tells the store once per second how a rank gets on, and a log who is late (``COMMRT_LIVE=1``).

On a thread of its own, which only reads the world, and waits as long as the store is silent; the
first member logs. A step pays nothing. The end of the process waits for the last record.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
from dataclasses import replace
from threading import Event
from time import time

from torch.distributed import DistNetworkError

from commrt.errors import CommrtError
from commrt.runtime.world import World
from commrt.store.client import ANSWER_S, ask, clone_connection
from commrt.store.late import LateWatch
from commrt.store.live import PERIOD_S, Record, base_of, publish, read
from commrt.threads.starting import start_thread

_log = logging.getLogger("commrt").getChild("late")


def start_publishing(world: World) -> None:
    """Publish how `world` gets on until it ends, or this process does."""
    publisher = Publisher(world)
    thread = start_thread(publisher.work, f"commrt-live{world.rank}")

    def end() -> None:
        publisher.process_ends.set()
        thread.join(ANSWER_S)

    atexit.register(end)


class Publisher:
    """One rank's records, and on the first member the findings; for one thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = clone_connection(base_of(world.store), world.timeout_s)
        self._host = socket.gethostname()
        self._number = 0
        self._since = (-1, 0.0)  # the number of steps, and when it was first seen
        self._watch = LateWatch()
        self._latest: Record | None = None
        self.process_ends = Event()
        """Set by the thread that ends the process."""

    @property
    def _has_ended(self) -> bool:
        return self._world.closed or self.process_ends.is_set()

    def work(self) -> None:
        """Publish once per second until the world, the process or the store ends."""
        is_last = False
        while not is_last:
            is_last = self._has_ended
            try:
                self.publish()
                if self._world.rank == self._world.members[0] and not is_last:
                    self.log_late()
            except DistNetworkError:  # the store is gone: torch makes no second connection
                return
            except (CommrtError, RuntimeError) as error:
                _log.debug("commrt: rank %d tries again to publish: %s", self._world.rank, error)
            self.process_ends.wait(PERIOD_S)

    def publish(self) -> None:
        """Write this rank's record, once a model was attached."""
        self._latest = self._record(time())
        if (record := self._latest) is not None:
            ask(lambda: publish(self._store, record, self._world.size))

    def _record(self, now_s: float) -> Record | None:
        """Return the record of now; it keeps the steps of a model that is gone."""
        self._number += 1
        closed = self._has_ended
        trained = self._world.trained()
        if trained is None:
            if self._latest is None:
                return None
            number = self._number
            return replace(self._latest, number=number, time_s=now_s, bucket=None, closed=closed)
        totals = trained.stats()
        if totals.steps != self._since[0]:
            self._since = (totals.steps, now_s)
        return Record(
            self._world.rank,
            self._host,
            self._number,
            now_s,
            trained.step,
            totals.steps,
            self._since[1],
            totals.exposed_s,
            trained.waits_for,
            closed,
            tuple([loss.rank for loss in self._world.lost]),
        )

    def log_late(self) -> None:
        """Log a line of JSON for each rank that is late, the same one at most every 10 s."""
        records = ask(lambda: read(self._store))
        now_s = time()
        found = self._watch.look(records, now_s)
        for late in self._watch.news(found, now_s):
            _log.warning("%s", json.dumps(late._asdict()))
