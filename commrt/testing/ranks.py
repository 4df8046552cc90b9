# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank, with threads of this process as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import CommrtError, PeerLost, TransportClosed
from commrt.membership.launcher import LOOPBACK
from commrt.runtime.connection import Means
from commrt.runtime.world import World
from commrt.testing import nccl
from commrt.transport.local import Fabric
from commrt.transport.nccl import NcclTransport
from commrt.transport.protocol import CPU, Transport

__all__ = ["Connect", "local_worlds", "over_nccl", "over_threads", "run_ranks"]

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


Reconnect = Callable[[int, int, Sequence[int], float], Transport]
"""(rank, generation, members, timeout_s) -> the transport of `rank` in a later generation."""


def _reconnect_over_threads(_: Store, ranks: int) -> Reconnect:
    fabrics: dict[int, Fabric] = {}

    def connect(rank: int, generation: int, _: Sequence[int], timeout_s: float) -> Transport:
        return fabrics.setdefault(generation, Fabric(ranks, timeout_s)).transport(rank)

    return connect


def _reconnect_over_nccl(store: Store, _: int) -> Reconnect:
    def connect(rank: int, generation: int, members: Sequence[int], timeout_s: float) -> Transport:
        return NcclTransport(PrefixStore(f"nccl {generation}", store), rank, members, timeout_s, CPU, nccl)

    return connect


RECONNECT: dict[Connect, Callable[[Store, int], Reconnect]] = {
    over_threads: _reconnect_over_threads,
    over_nccl: _reconnect_over_nccl,
}


def local_worlds(
    size: int, timeout_s: float = 20.0, wrap: Wrap = lambda transport: transport, connect: Connect | None = None
) -> list[World]:
    """Return worlds of `size` threads that share a store; connected by `over_threads`, transports passed to `wrap`."""
    store, chosen = HashStore(), connect or over_threads
    reconnect = RECONNECT[chosen](store, size) if chosen in RECONNECT else None

    def open_one(rank: int, transport: Transport) -> World:
        means = None if reconnect is None else Means(lambda *given: wrap(reconnect(rank, *given)), LOOPBACK)
        return World(wrap(transport), store, rank, "threads", means=means)

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
