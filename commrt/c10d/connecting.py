# SPDX-License-Identifier: Apache-2.0
"""Connects the ranks of a process group, and chooses the cluster its schedules are priced for.

On the thread that makes the group. It reads the environment's COMMRT_CLUSTER, COMMRT_SCHEDULES and
COMMRT_SAME_BITS, which must be equal on all ranks. `unused_part` counts groups on torch's store;
all else is written to the group's part of it. The process keeps the latest selections.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch.distributed import PrefixStore, Store

from commrt.pricing.cluster import Cluster
from commrt.pricing.forced import parse_forced
from commrt.pricing.selection import PROVEN_RANKS, Selection
from commrt.runtime.connection import compare_starts, connect_hosts, listening_address
from commrt.store.client import call_store
from commrt.store.environment import is_on, variable
from commrt.store.launcher import LOOPBACK
from commrt.store.records import gather
from commrt.transport.local import Fabric
from commrt.transport.protocol import Transport

_log = logging.getLogger("commrt")
CHOICES = "COMMRT_CLUSTER, COMMRT_SCHEDULES or COMMRT_SAME_BITS"


def unused_part(store: Store, rank: int, size: int) -> Store:
    """Return a part of `store` in which nothing stands yet, the same on all ranks of the group.

    The store of a launcher outlives the groups of a process, and torch gives later ones the same
    names.
    """
    counter = f"starts of {size}"
    earlier = (call_store(lambda: store.add(counter, 1), rank=rank) - 1) // size
    return PrefixStore(f"{counter}/{earlier}", store)


def connect(
    store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]
) -> tuple[Transport, str | None, Selection]:
    """Return the transport of this rank, the address to listen on, and what chooses schedules."""
    given = variable("COMMRT_CLUSTER")
    forced = parse_forced(variable("COMMRT_SCHEDULES"), same_bits=is_on("COMMRT_SAME_BITS"))
    cluster = Cluster.named(given or "host")
    if size == 1:
        return Fabric(1).transport(0), LOOPBACK, _selection(cluster, [0], forced)
    choice = json.dumps([cluster.text() if given else "", sorted(forced.items())])
    start = compare_starts(store, rank, range(size), timeout_s, (CHOICES, choice))
    transport = connect_hosts(store, rank, start, timeout_s)
    address: str | None = LOOPBACK
    if not transport.one_host:
        address = listening_address(start)
        # no rank goes on, and perhaps ends, while others still connect to it
        gather(PrefixStore("connected", store), rank, range(size), None, timeout_s, json.loads)
    if not given:  # the hosts of the group are its cluster
        hosts = [*start.hosts.values()]
        per_host = max(map(hosts.count, hosts))
        cluster = replace(cluster, gpus_per_node=per_host)
        global_ranks = _places(hosts, per_host)
    return transport, address, _selection(cluster, global_ranks, forced)


def _selection(cluster: Cluster, ranks: Sequence[int], forced: Mapping[str, str]) -> Selection:
    """Return the same object, which knows its choices, for a group of the same places."""
    return _selection_of(cluster.text(), cluster.name, tuple(ranks), tuple(forced.items()))


@lru_cache(64)
def _selection_of(
    text: str, name: str, ranks: tuple[int, ...], forced: tuple[tuple[str, str], ...]
) -> Selection:
    if len(ranks) > PROVEN_RANKS:
        _log.warning(
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
