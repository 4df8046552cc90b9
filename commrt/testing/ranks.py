# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank, with threads of this process as ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from commrt.errors import CommrtError, PeerLost, TransportClosed
from commrt.transport.local import Fabric
from commrt.transport.protocol import Transport
from commrt.world import World

__all__ = ["local_worlds", "run_ranks"]

T = TypeVar("T")
Wrap = Callable[[Transport], Transport]


def local_worlds(size: int, timeout_s: float = 20.0, wrap: Wrap = lambda transport: transport) -> list[World]:
    """Worlds of `size` thread-ranks that share one fabric and one store; `wrap` may change each transport."""
    fabric, store = Fabric(size, timeout_s), HashStore()
    return [World(wrap(fabric.transport(rank)), store, rank, "threads") for rank in range(size)]


def run_ranks(
    size: int, body: Callable[[World], T], timeout_s: float = 20.0, wrap: Wrap = lambda transport: transport
) -> list[T]:
    """Call ``body(world)`` on `size` threads and return the results by rank.

    A rank that raises closes its world, so the others end too; the error raised here is the one that came
    first in meaning: one that is not merely the echo of a lost peer.
    """
    worlds = local_worlds(size, timeout_s, wrap)

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
