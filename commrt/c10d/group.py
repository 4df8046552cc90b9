# SPDX-License-Identifier: Apache-2.0
"""One process group of torch.distributed: a world of its own, its collectives, and its sends and receives."""

from __future__ import annotations

import atexit
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch.distributed import PrefixStore, Store

from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group_work import as_dist_error
from commrt.c10d.messages import DeviceMessages, HostMessages
from commrt.errors import CommrtError, TransportClosed
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import Selection, parse_forced
from commrt.runtime.connection import connect_hosts, local_rank
from commrt.runtime.world import World
from commrt.store.agreement import gather
from commrt.store.client import call_store
from commrt.store.launcher import LOOPBACK, chosen_cluster, chosen_schedules, wants_same_bits
from commrt.store.rendezvous import host_identity
from commrt.threads.comm_thread import EXIT_S
from commrt.threads.deadline import require_deadlines
from commrt.transport.gloo import GlooTransport
from commrt.transport.local import Fabric
from commrt.transport.protocol import Transport

CONNECT_TRIES = 5
"""Of Gloo to connect two ranks (torch 2.13), each with its own timeout. A late or dead peer takes all of them."""
ONE_HOST = "host"
"""The built-in cluster for which schedules are chosen if COMMRT_CLUSTER is not set."""


class ProcessGroupWorld:
    """Connects the ranks of the group that torch asks for in `options`, a ``_DistributedBackendOptions``. Collective.

    Raises `TransportError` if a rank does not come.
    """

    def __init__(self, options: Any) -> None:
        rank, size, timeout_s = options.group_rank, options.group_size, options.timeout.total_seconds()
        global_ranks = list(options.global_ranks_in_group) or list(range(size))
        try:
            require_deadlines(timeout=timeout_s)
            self.store = _unused(options.store, rank, size)
            transport, selection = _connect(self.store, rank, size, timeout_s, global_ranks)
            self.world = World(transport, self.store, local_rank(), "torch.distributed")
        except CommrtError as error:
            as_dist_error(error)
            raise
        self.requests, self.engine = CheckedCalls(rank, size), CallEngine(self.world, selection, options.group_id)
        self._host = LOOPBACK if transport.one_host else None
        # A receive from any rank reads all ranks' addresses from the store, so all must be there from the start.
        gloo = self.open_gloo("messages", timeout_s / CONNECT_TRIES)
        self.host_messages = HostMessages(gloo, self.world)
        self.device_messages = DeviceMessages(self.world)
        _OPEN.add(self)

    def set_timeout(self, timeout_s: float) -> None:
        """Give later collectives, sends and receives another deadline."""
        require_deadlines(timeout=timeout_s)
        self.world.transport.timeout_s = self.engine.timeout_s = self.host_messages.timeout_s = timeout_s

    def open_gloo(self, name: str, timeout_s: float) -> GlooTransport:
        """Return connections of Gloo between all ranks, of which two are made when these first exchange.

        Each `name` can be opened once. Gloo takes `timeout_s` to connect, and to exchange where nothing else is said.
        """
        store, world = PrefixStore(name, self.store), self.world
        try:
            return GlooTransport(store, world.rank, range(world.size), timeout_s, self._host, lazy=True)
        except CommrtError as error:
            as_dist_error(error)
            raise

    def close(self) -> None:
        """Finish what was started, then close all connections. Safe to call twice."""
        try:
            self.world.close()
        except CommrtError as error:
            as_dist_error(error)
            raise
        _OPEN.discard(self)
        self.host_messages.close()

    def abort(self) -> None:
        """End what is in flight with an error; call `close` too."""
        self.world.abort(TransportClosed("the process group was aborted"))
        self.host_messages.close()


def _unused(store: Store, rank: int, size: int) -> Store:
    """Return a part of `store` in which nothing stands yet, the same on all ranks of the group.

    The store of a launcher outlives the groups of a process, and torch gives later ones the same names.
    """
    counter = f"starts of {size}"
    earlier = (call_store(lambda: store.add(counter, 1), rank=rank) - 1) // size
    return PrefixStore(f"{counter}/{earlier}", store)


def _connect(
    store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]
) -> tuple[Transport, Selection]:
    given, forced = chosen_cluster(), parse_forced(chosen_schedules(), same_bits=wants_same_bits())
    cluster = Cluster.named(given or ONE_HOST)
    if size == 1:
        return Fabric(1).transport(0), Selection(cluster, [0], forced)
    choice = json.dumps([cluster.text() if given else "", sorted(forced.items())])
    transport = connect_hosts(store, rank, range(size), timeout_s, choice=choice)
    if given:
        return transport, Selection(cluster, global_ranks, forced)
    hosts = ["here"] * size
    if not transport.one_host:
        here = host_identity() or f"rank {rank}"
        hosts = [*gather(PrefixStore("hosts", store), rank, range(size), here, timeout_s, json.loads).values()]
    per_host = max(map(hosts.count, hosts))
    return transport, Selection(replace(cluster, gpus_per_node=per_host), _places(hosts, per_host), forced)


def _places(hosts: Sequence[str], per_host: int) -> list[int]:
    """Return the place of each rank in a cluster of hosts with `per_host` ranks each.

    >>> _places(["a", "b", "a"], 2)
    [0, 2, 1]
    """
    first = {host: per_host * number for number, host in enumerate(dict.fromkeys(hosts))}
    return [first[host] + hosts[:rank].count(host) for rank, host in enumerate(hosts)]


_OPEN: WeakSet[ProcessGroupWorld] = WeakSet()


def _at_exit() -> None:
    """End all groups that the program has left open, without waiting for the deadline of a running collective."""
    for group in tuple(_OPEN):
        group.world.abort(TransportClosed("the process ended without destroying its process group"))
        with suppress(TimeoutError):
            group.world.comm_thread.close(EXIT_S)
            group.close()


atexit.register(_at_exit)
