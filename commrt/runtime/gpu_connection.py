# SPDX-License-Identifier: Apache-2.0
"""This rank's GPU, and its connection with those of the other ranks.

`connect_world` adds a transport to a world and gives its communication thread streams, on that
thread; the other public functions change nothing of it, and run on whichever thread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Protocol, cast

import torch
from torch.distributed import PrefixStore, Store

from commrt.errors import TransportError, UsageError
from commrt.runtime.ending import Ending
from commrt.runtime.membership import Membership
from commrt.store.client import clone_connection
from commrt.store.world_config import WorldConfig
from commrt.threads.comm_thread import CommThread
from commrt.threads.streams import streams_of
from commrt.transport.by_device import TransportByDevice
from commrt.transport.names import GPU_TRANSPORTS, chosen_transport
from commrt.transport.null import NullTransport
from commrt.transport.protocol import Transport

NCCL_BINDING = "commrt.transport.nccl_binding:load"


class ConnectedWorld(Protocol):
    """What is used here of a world."""

    rank: int
    size: int
    config: WorldConfig | None
    store: Store
    transport: TransportByDevice
    comm_thread: CommThread
    membership: Membership
    ending: Ending

    @property
    def timeout_s(self) -> float:
        """See `World.timeout_s`."""

    def agree(self, topic: str) -> None:
        """See `World.agree`."""


def default_device(local_rank: int) -> torch.device:
    """Return the GPU of a rank, or the CPU without one; raises `UsageError` for too many ranks.

    A rank may see all GPUs of its host, or only its own.
    """
    gpus = torch.cuda.device_count()
    if gpus > 1 and local_rank >= gpus:
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own, as this process sees {gpus}: start no"
            " more ranks on a host than it has GPUs"
        )
    return torch.device("cuda", local_rank if gpus > 1 else 0) if gpus else torch.device("cpu")


def connect_world(world: ConnectedWorld, device: torch.device | str) -> None:
    """See `World.connect`."""
    if world.size == 1:
        return
    chosen = require_gpu(device)
    world.transport.require_no_other(chosen)
    if not world.transport.reaches(chosen):
        if world.config is None:
            world.agree("connect")
        world.comm_thread.submit(lambda: _add_gpu(world, chosen)).result()


def require_gpu(device: torch.device | str) -> torch.device:
    """Return `device` with its index; raises `UsageError` unless it is a GPU that NCCL can use."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(
            f"{device} is no NVIDIA GPU of this machine: CPU tensors need no connect()"
        )
    resolve_name(NCCL_BINDING)()  # raises here, before anybody waits for this rank
    return torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen


def _add_gpu(world: ConnectedWorld, device: torch.device) -> None:
    streams = streams_of(device)
    streams.enter()
    members = world.membership.ranks
    if world.config is None:
        name = f"connect {world.membership.number}"
        transport = connect_gpu_of(world, name, device, members)
    else:
        # a process that takes a lost rank's place connects when the others let it in
        transport = NullTransport(world.rank, members, world.timeout_s)
    world.transport.add(device, transport)
    world.comm_thread.streams = streams


def connect_gpu_of(
    world: ConnectedWorld, name: str, device: torch.device, members: Sequence[int]
) -> Transport:
    """Connect `device` of this rank with the GPUs of `members` and return the transport.

    `name` is one that was not used before. Collective.
    """
    store = PrefixStore(name, clone_connection(world.store, world.timeout_s))
    on_late = world.ending.on_late_failure
    return connect_gpu(store, world.rank, members, world.timeout_s, device, on_late)


def connect_gpu(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    on_failure: Callable[[TransportError], None],
) -> Transport:
    """Connect `members` by NCCL, and by peers' memory where possible. Collective.

    COMMRT_TRANSPORT may forbid peers' memory. `on_failure` is called with an error that ends an
    exchange for which nobody waits.
    """
    asked = chosen_transport()
    connects = resolve_name(
        GPU_TRANSPORTS[asked] if asked in GPU_TRANSPORTS else next(iter(GPU_TRANSPORTS.values()))
    )
    return cast(
        "Transport", connects(store, rank, members, timeout_s, device, on_failure=on_failure)
    )
