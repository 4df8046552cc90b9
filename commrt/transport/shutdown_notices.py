# SPDX-License-Identifier: Apache-2.0
"""Notices on the store of ranks that end their communicator, because NCCL does not tell the others.

Threads of its own read the store; the watchdog of `commrt.transport.group_watch` asks for what they
have read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress

from torch.distributed import Store

from commrt.errors import TransportError
from commrt.store.client import call_store, clone_connection, start_request
from commrt.store.parsing import MALFORMED, parse_int
from commrt.threads.deadline import clock
from commrt.threads.future import Future

READ_INTERVAL_S = 0.5
"""Seconds between two reads: a GPU behind its host is not late, and all read from one store."""
Counts = dict[int, int] | None
"""Groups that a rank had begun with each peer when it closed; None for a rank that gave up."""


class ShutdownNotices:
    """Notices on the store of ranks that end their communicator, for ranks that wait for them.

    A rank that closed has done its part in all groups that it counts. A rank that gave up has not,
    and counts none. `announce` is for any thread, `find_early_leaver` for the watchdog.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._store = clone_connection(store, timeout_s)
        self._rank = rank
        self._known: dict[int, Counts] = {}  # written by the thread that reads
        self._asked: set[int] = set()
        """Peers that were asked about since the last read began: the next one covers them all."""
        self._reading: Future[None] | None = None
        self._next_read_s = 0.0

    def announce(self, counts: Counts) -> None:
        """Tell the others that this rank shuts down. Waits for 2 s at most."""
        # the store is gone, and the other ranks with it
        with suppress(RuntimeError, TransportError):
            call_store(lambda: self._store.set(f"left/{self._rank}", json.dumps(counts)))

    def find_early_leaver(self, begun: Mapping[int, int]) -> int | None:
        """Return a peer known to have left without its part in what was `begun` with it, or None.

        Never waits: now and then it lets another thread read the store, for later calls.
        """
        self._asked.update(begun)
        if (self._reading is None or self._reading.done()) and clock.now_s() >= self._next_read_s:
            self._next_read_s = clock.now_s() + READ_INTERVAL_S
            asked = self._asked
            self._asked = set()
            self._reading = start_request(lambda: self._read(asked))
        known = ((peer, self._known[peer]) for peer in begun if peer in self._known)
        return next(
            (
                peer
                for peer, counts in known
                if counts is None or counts.get(self._rank, 0) < begun[peer]
            ),
            None,
        )

    def _read(self, peers: Collection[int]) -> None:
        for peer in peers:
            key = f"left/{peer}"
            if self._store.check([key]):
                with suppress(*MALFORMED):  # a malformed notice is none
                    self._known[peer] = _parse_counts(self._store.get(key))


def _parse_counts(data: bytes) -> Counts:
    counts = json.loads(data)
    return (
        None if counts is None else {int(peer): parse_int(count) for peer, count in counts.items()}
    )
