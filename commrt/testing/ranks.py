# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank, with threads of this process as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import CommrtError, PeerLost, TransportClosed
from commrt.membership.launcher import LOOPBACK
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.world import World
from commrt.testing import nccl
from commrt.testing.peer_memory import HostPeerMemory
from commrt.transport.local import Fabric
from commrt.transport.nccl import NcclTransport
from commrt.transport.neighbours import Neighbours
from commrt.transport.peers import PeersTransport
from commrt.transport.protocol import CPU, QueueingTransport, Transport

__all__ = ["Connect", "local_worlds", "over_nccl", "over_peers", "over_threads", "run_ranks"]

T = TypeVar("T")
Wrap = Callable[[Transport], Transport]
Connect = Callable[[Store, int, float], Sequence[Transport]]
"""(store, ranks, timeout_s) -> the transports of a new world, by rank."""


def over_threads(store: Store, ranks: int, timeout_s: float) -> list[Transport]:  # noqa: ARG001  # a `Connect` takes a store
    """Connect the ranks by one `Fabric`; a `Connect`."""
    fabric = Fabric(ranks, timeout_s)
    return [fabric.transport(rank) for rank in range(ranks)]


def over_nccl(store: Store, ranks: int, timeout_s: float) -> list[Transport]:
    """Connect the ranks by `NcclTransport` over the stand-in for NCCL, which moves CPU tensors; a `Connect`."""
    prefix = PrefixStore("nccl", store)

    def connect(rank: int) -> Transport:
        return NcclTransport(prefix, rank, range(ranks), timeout_s, CPU, nccl)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(connect, range(ranks)))


def over_peers(store: Store, ranks: int, timeout_s: float) -> list[Transport]:
    """Connect the ranks by `PeersTransport` over stand-ins for NCCL and for GPUs' memory; a `Connect`."""
    rest = over_nccl(store, ranks, timeout_s)

    def connect(nccl: Transport) -> Transport:
        memory = HostPeerMemory()
        prefix = PrefixStore("peers", store)
        neighbours = Neighbours(prefix, nccl.rank, nccl.members, timeout_s, memory, "host")
        return PeersTransport(cast("QueueingTransport", nccl), neighbours, memory, CPU)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(connect, rest))


RECONNECTING = (over_threads, over_nccl)


def local_worlds(
    size: int, timeout_s: float = 20.0, wrap: Wrap = lambda transport: transport, connect: Connect | None = None
) -> list[World]:
    """Return worlds of `size` threads that share a store; transports are passed to `wrap`.

    Worlds connected by `over_threads` or `over_nccl` connect again without lost ranks.
    """
    store, fabrics, chosen = HashStore(), dict[int, Fabric](), connect or over_threads

    def reconnect(rank: int, generation: int, members: Sequence[int], timeout_s: float) -> Transport:
        if chosen is over_nccl:
            prefix = PrefixStore(f"nccl {generation}", store)
            return wrap(NcclTransport(prefix, rank, members, timeout_s, CPU, nccl))
        return wrap(fabrics.setdefault(generation, Fabric(size, timeout_s)).transport(rank))

    def open_one(rank: int, transport: Transport) -> World:
        options = ReconnectOptions(partial(reconnect, rank), LOOPBACK) if chosen in RECONNECTING else None
        return World(wrap(transport), store, rank, "threads", reconnect_options=options)

    return [open_one(*each) for each in enumerate(chosen(store, size, timeout_s))]


def run_ranks(
    size: int,
    body: Callable[[World], T],
    timeout_s: float = 20.0,
    wrap: Wrap = lambda transport: transport,
    connect: Connect | None = None,
) -> list[T]:
    """Call ``body(world)`` on `size` threads and return the results by rank.

    A rank that raises closes its world, so the others end too. Of several errors, this function raises the cause: one
    that is not just the consequence of a lost peer.
    """
    worlds = local_worlds(size, timeout_s, wrap, connect)

    def one(world: World) -> T:
        with world:
            return body(world)

    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(one, world) for world in worlds]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=_severity)
    return [future.result() for future in futures]


def _severity(error: BaseException) -> int:
    return 2 if isinstance(error, PeerLost | TransportClosed) else 1 if isinstance(error, CommrtError) else 0
