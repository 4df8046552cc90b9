# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank, with threads of this process as ranks.

For tests. Each thread has a world of its own, which has a communication thread. All share a store
and, by default, a fabric in memory. Nothing here writes `RECONNECTING`: who brings another way to
connect does, once, before any thread of a rank starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import CommrtError, PeerLost, QuorumLost, TransportClosed
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.world import World
from commrt.store.launcher import LOOPBACK
from commrt.transport.local import Fabric
from commrt.transport.protocol import Transport

T = TypeVar("T")
Wrap = Callable[[Transport], Transport]
Connect = Callable[[Store, int, float], Sequence[Transport]]
"""(store, ranks, timeout_s) -> the transports of a new world, by rank."""


def over_threads(store: Store, ranks: int, timeout_s: float) -> list[Transport]:  # noqa: ARG001  # a `Connect` takes a store
    """Connect the ranks by one `Fabric`; a `Connect`."""
    fabric = Fabric(ranks, timeout_s)
    return [fabric.transport(rank) for rank in range(ranks)]


RECONNECTING: dict[Connect, Callable[[Store, int, Sequence[int], float], Transport]] = {}
"""What connects one rank again, by what connected all: add yours before you make such worlds.

`over_threads` needs no entry.
"""


def local_worlds(
    size: int,
    timeout_s: float = 20.0,
    wrap: Wrap = lambda transport: transport,
    connect: Connect | None = None,
) -> list[World]:
    """Return worlds of `size` threads that share a store; transports are passed to `wrap`.

    Worlds connected by `over_threads`, or by a function in `RECONNECTING`, connect again without
    lost ranks.
    """
    store = HashStore()
    fabrics = dict[int, Fabric]()
    chosen = connect or over_threads

    def reconnect(
        rank: int, generation: int, members: Sequence[int], timeout_s: float
    ) -> Transport:
        if again := RECONNECTING.get(chosen):
            return wrap(
                again(PrefixStore(f"generation {generation}", store), rank, members, timeout_s)
            )
        return wrap(fabrics.setdefault(generation, Fabric(size, timeout_s)).transport(rank))

    def open_one(rank: int, transport: Transport) -> World:
        again = chosen in (over_threads, *RECONNECTING)
        options = ReconnectOptions(partial(reconnect, rank), LOOPBACK) if again else None
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

    A rank that raises closes its world, so the others end too. Of several errors, this function
    raises the cause: one that is not just the consequence of a lost peer.
    """
    worlds = local_worlds(size, timeout_s, wrap, connect)

    def one(world: World) -> T:
        with world:
            return body(world)

    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(one, world) for world in worlds]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=severity)
    return [future.result() for future in futures]


def severity(error: BaseException) -> int:
    """Rank errors that only follow from another rank's last."""
    if isinstance(error, PeerLost | QuorumLost | TransportClosed):
        return 2
    return 1 if isinstance(error, CommrtError) else 0
