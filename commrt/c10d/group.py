# SPDX-License-Identifier: Apache-2.0
"""One process group of torch.distributed: a world of its own, from its connections to its end.

The thread that makes a group connects it, and decides for which cluster its schedules are priced.
Any thread may end it. A group whose owner is gone ends on a thread of its own; the end of the
program ends all that are left.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed import PrefixStore, Store

from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.device_messages import DeviceMessages
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.host_messages import HostMessages
from commrt.errors import CommrtError, TransportClosed
from commrt.pricing.cluster import Cluster
from commrt.pricing.forced import parse_forced
from commrt.pricing.selection import PROVEN_RANKS, Selection
from commrt.runtime.connection import compare_starts, connect_hosts, listening_address
from commrt.runtime.torch_version import check_torch_version
from commrt.runtime.world import World
from commrt.store.client import call_store
from commrt.store.environment import is_on, variable
from commrt.store.keys import delete_keys
from commrt.store.launcher import LOOPBACK, local_rank
from commrt.store.records import gather
from commrt.threads.calls import start_call
from commrt.threads.comm_thread import EXIT_S
from commrt.threads.deadline import require_deadlines
from commrt.threads.starting import start_thread
from commrt.transport.gloo import GlooTransport
from commrt.transport.local import Fabric
from commrt.transport.protocol import Transport

_log = logging.getLogger("commrt")
CHOICES = "COMMRT_CLUSTER, COMMRT_SCHEDULES or COMMRT_SAME_BITS"
CONNECT_TRIES = 5
"""Of Gloo to connect two ranks (torch 2.13), each with its own timeout.

A late or dead peer takes all of them.
"""


class ProcessGroupWorld:
    """The world of the group that torch asks for in `options`, a ``_DistributedBackendOptions``.

    Collective to make.
    """

    def __init__(self, options: Any) -> None:
        check_torch_version()
        rank = options.group_rank
        size = options.group_size
        timeout_s = options.timeout.total_seconds()
        global_ranks = list(options.global_ranks_in_group) or list(range(size))
        require_deadlines(timeout=timeout_s)
        self.store = _unused(options.store, rank, size)
        transport, host, selection = _connect(self.store, rank, size, timeout_s, global_ranks)
        self.world = World(transport, self.store, local_rank(), "torch.distributed")
        self.requests = CheckedCalls(rank, size)
        self.engine = CallEngine(self.world, selection, options.group_id)
        # A receive from any rank reads all ranks' addresses from the store, so all must be there
        # from the start.
        self.gloo = GlooTransport(
            PrefixStore("messages", self.store),
            rank,
            range(size),
            timeout_s / CONNECT_TRIES,
            host,
            lazy=True,
        )
        self.host_messages = HostMessages(self.gloo, self.world)
        self.device_messages = DeviceMessages(self.world)
        self.set_timeout(timeout_s)
        self._finalizer: Any = None
        _OPEN.add(self)

    def close_with(self, owner: object) -> None:
        """Close this group, as `close` does, when `owner`, the object that torch holds, is gone."""
        _start_closing_dropped()
        # a queue takes it amid garbage collection, too
        self._finalizer = finalize(owner, _dropped.put, self)
        self._finalizer.atexit = False

    def set_timeout(self, timeout_s: float) -> None:
        """Give later collectives, sends and receives another deadline."""
        require_deadlines(timeout=timeout_s)
        self.world.transport.timeout_s = timeout_s
        self.engine.timeout_s = timeout_s
        self.host_messages.timeout_s = timeout_s
        gloo = self.gloo.process_group
        if gloo is not None:  # else this group was closed
            gloo._set_default_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  # torch's name

    def close(self, limit_s: float | None = None) -> None:
        """Finish what was started, sends within `limit_s`, then close; safe to call twice."""
        if self._finalizer is not None:
            self._finalizer.detach()
        try:
            self.world.close()
        except CommrtError as error:
            raise as_dist_error(error) from error.__cause__
        _OPEN.discard(self)
        if self.world.comm_thread.failure is None:
            self.host_messages.finish_sends(limit_s)
            if _OPEN:  # else the store may end any moment, with the process that holds it
                self._delete_keys()
        self.host_messages.close()

    def _delete_keys(self) -> None:
        """Delete what this group has left on the store, if all other ranks have closed it."""

        def leave() -> None:
            if self.store.add("closed", 1) == self.world.size:
                delete_keys(self.store)

        with suppress(CommrtError, RuntimeError):  # the store is gone, with all that it held
            call_store(leave, rank=self.world.rank)

    def abort(self, reason: str = "the process group was aborted") -> None:
        """End what is in flight with an error that says `reason`; call `close` too."""
        self.world.abort(TransportClosed(reason))
        self.host_messages.close()


def _unused(store: Store, rank: int, size: int) -> Store:
    """Return a part of `store` in which nothing stands yet, the same on all ranks of the group.

    The store of a launcher outlives the groups of a process, and torch gives later ones the same
    names.
    """
    counter = f"starts of {size}"
    earlier = (call_store(lambda: store.add(counter, 1), rank=rank) - 1) // size
    return PrefixStore(f"{counter}/{earlier}", store)


def _connect(
    store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]
) -> tuple[Transport, str | None, Selection]:
    given = variable("COMMRT_CLUSTER")
    forced = parse_forced(variable("COMMRT_SCHEDULES"), same_bits=is_on("COMMRT_SAME_BITS"))
    cluster = Cluster.named(given or "host")
    if size == 1:
        return Fabric(1).transport(0), LOOPBACK, _selection(cluster, [0], forced)
    choice = json.dumps([cluster.text() if given else "", sorted(forced.items())])
    start = compare_starts(store, rank, range(size), timeout_s, (CHOICES, choice))
    transport = connect_hosts(store, rank, start, timeout_s)
    address = LOOPBACK if transport.one_host else listening_address(start)
    hosts = [*start.hosts.values()]
    # no rank goes on, and perhaps ends, while others still connect to it
    if not transport.one_host:
        gather(PrefixStore("connected", store), rank, range(size), None, timeout_s, json.loads)
    if given:
        return transport, address, _selection(cluster, global_ranks, forced)
    per_host = max(map(hosts.count, hosts))
    return (
        transport,
        address,
        _selection(replace(cluster, gpus_per_node=per_host), _places(hosts, per_host), forced),
    )


def _selection(cluster: Cluster, ranks: Sequence[int], forced: Mapping[str, str]) -> Selection:
    """Return the same object, which knows its choices, for a group of the same places."""
    return _selection_of(cluster.text(), cluster.name, tuple(ranks), tuple(forced.items()))


@lru_cache(64)
def _selection_of(
    text: str, name: str, ranks: tuple[int, ...], forced: tuple[tuple[str, str], ...]
) -> Selection:
    if len(ranks) > PROVEN_RANKS:
        _log.info(
            "a group of %d ranks: schedules are proven for at most %d", len(ranks), PROVEN_RANKS
        )
    return Selection(Cluster.parsed(text, name), ranks, dict(forced))


def _places(hosts: Sequence[str], per_host: int) -> list[int]:
    """Return the place of each rank in a cluster of hosts with `per_host` ranks each.

    >>> _places(["a", "b", "a"], 2)
    [0, 2, 1]
    """
    first = {host: per_host * number for number, host in enumerate(dict.fromkeys(hosts))}
    return [first[host] + hosts[:rank].count(host) for rank, host in enumerate(hosts)]


_OPEN: WeakSet[ProcessGroupWorld] = WeakSet()
_dropped: SimpleQueue[ProcessGroupWorld] = SimpleQueue()
"""Groups whose owner is gone, to be closed."""


@cache
def _start_closing_dropped() -> None:
    start_thread(_close_dropped, "commrt-dropped-groups")


os.register_at_fork(after_in_child=_start_closing_dropped.cache_clear)


def _close_dropped() -> None:
    while True:
        start_call(_dropped.get().close)  # which may take as long as a collective of the group


def _at_exit() -> None:
    """End all groups that the program has left open, without waiting for running collectives.

    What was sent still arrives, if its receiver comes soon.
    """
    for group in tuple(_OPEN):
        if group.world.comm_thread.failure is None:
            group.host_messages.finish_sends(EXIT_S)
        group.world.abort(TransportClosed("the process ended without destroying its process group"))
        with suppress(TimeoutError):
            group.world.comm_thread.close(EXIT_S)
            group.close(EXIT_S)


atexit.register(_at_exit)
