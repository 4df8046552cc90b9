# SPDX-License-Identifier: Apache-2.0
"""How a rank waits for packets of its peers: it looks for a while, then sleeps on the sockets.

So a process that ends is noticed, however it ends. For the thread that exchanges; reads no packets,
and tells peers only whether this rank sleeps.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from math import ceil
from time import perf_counter

from commrt.threads.deadline import clock
from commrt.transport.peer_exchange import PeerExchange

LOOK_S = 100e-6
"""Seconds that a rank looks for packets before it sleeps: to sleep and to wake takes longer."""


class PacketWait:
    """The waits of one rank among `ranks` of its host, for exchanges given by their descriptors."""

    def __init__(self, ranks: int) -> None:
        self._is_crowded = ranks > len(os.sched_getaffinity(0))
        """True if other ranks of this host may need the core on which this one waits."""
        self._no_descriptors = select.poll()

    def look(self, waiting: Mapping[int, PeerExchange]) -> list[int]:
        """Look for a while for what peers have written; return descriptors of those that have."""
        end_s = perf_counter() + LOOK_S
        while True:
            ready = [fd for fd, exchange in waiting.items() if exchange.channel.can_progress]
            if ready:
                return ready
            if perf_counter() > end_s:
                return []
            self._no_descriptors.poll(0)  # lets other threads run
            if self._is_crowded:
                os.sched_yield()

    def sleep(self, waiting: Mapping[int, PeerExchange], left_s: float) -> list[int]:
        """Sleep for at most `left_s` seconds; return the descriptors of peers that have sent."""
        if left_s <= 0:
            return []
        channels = {fd: exchange.channel for fd, exchange in waiting.items()}
        try:
            ready = [fd for fd, channel in channels.items() if channel.begin_sleep()]
            if ready:
                return ready
            poller = select.poll()
            for fd, channel in channels.items():
                poller.register(fd, select.POLLIN | (select.POLLOUT if channel.needs_socket else 0))
            return [fd for fd, _ in poller.poll(ceil(min(left_s, clock.slice_s) * 1000))]
        finally:
            for channel in channels.values():
                channel.end_sleep()
