# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank, with threads of this process as ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import CommrtError, PeerLost, TransportClosed
from commrt.membership.launcher import LOOPBACK
from commrt.runtime.reconnection import Means
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


def over_threads(store: Store, ranks: int, timeout_s: float) -> list[Transport]:  # noqa: ARG001  # as others need it
    """Ranks of one `Fabric`: a `Connect`."""
    fabric = Fabric(ranks, timeout_s)
    return [fabric.transport(rank) for rank in range(ranks)]


def over_nccl(store: Store, ranks: int, timeout_s: float) -> list[Transport]:
    """What runs on GPUs, over a stand-in for NCCL that moves CPU tensors between threads: a `Connect`."""
    shelf = PrefixStore("nccl", store)

    def connect(rank: int) -> Transport:
        return NcclTransport(shelf, rank, range(ranks), timeout_s, CPU, nccl)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(connect, range(ranks)))


Again = Callable[[int, int, Sequence[int], float], Transport]
"""A `Connect` for all ranks of a process: (rank, generation, members, timeout_s)."""


def _again_over_threads(_: Store, ranks: int) -> Again:
    fabrics: dict[int, Fabric] = {}

    def connect(rank: int, generation: int, _: Sequence[int], timeout_s: float) -> Transport:
        return fabrics.setdefault(generation, Fabric(ranks, timeout_s)).transport(rank)

    return connect


def _again_over_nccl(store: Store, _: int) -> Again:
    def connect(rank: int, generation: int, members: Sequence[int], timeout_s: float) -> Transport:
        return NcclTransport(PrefixStore(f"nccl {generation}", store), rank, members, timeout_s, CPU, nccl)

    return connect


AGAIN: dict[Connect, Callable[[Store, int], Again]] = {
    over_threads: _again_over_threads,
    over_nccl: _again_over_nccl,
}


def local_worlds(
    size: int, timeout_s: float = 20.0, wrap: Wrap = lambda transport: transport, connect: Connect | None = None
) -> list[World]:
    """Worlds of `size` thread-ranks that share one store, connected by `over_threads`; `wrap` may change transports."""
    store, chosen = HashStore(), connect or over_threads
    again = AGAIN[chosen](store, size) if chosen in AGAIN else None

    def open_one(rank: int, transport: Transport) -> World:
        means = None if again is None else Means(lambda *given: wrap(again(rank, *given)), LOOPBACK)
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

    A rank that raises closes its world, so the others end too; the error raised here is the one that came
    first in meaning: one that is not merely the echo of a lost peer.
    """
    worlds = local_worlds(size, timeout_s, wrap, connect)

    def one(world: World) -> T:
        with world:
            return body(world)

    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(one, world) for world in worlds]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=_echo)
    return [future.result() for future in futures]


def _echo(error: BaseException) -> int:
    return 2 if isinstance(error, PeerLost | TransportClosed) else 1 if isinstance(error, CommrtError) else 0
