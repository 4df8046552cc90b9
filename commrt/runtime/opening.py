# SPDX-License-Identifier: Apache-2.0
"""How a process comes to its world: through a running group, a launcher's variables, or alone."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import TransportClosed, UsageError
from commrt.membership.launcher import (
    DEFAULT_TIMEOUT_S,
    LOOPBACK,
    Launch,
    chosen_transport,
    default_timeout_s,
    gloo_interface,
    launched,
    require_deadlines,
)
from commrt.membership.liveness import own_address
from commrt.membership.rendezvous import is_loopback, meet
from commrt.membership.store_client import STORE_ANSWER_S, call_store, clone_connection
from commrt.membership.world_config import WorldConfig
from commrt.runtime.around import Around
from commrt.runtime.connection import connect_hosts, local_rank
from commrt.runtime.reconnection import Connect, Means
from commrt.runtime.world import World
from commrt.transport.local import Fabric
from commrt.transport.meeting import host_identity
from commrt.transport.protocol import Transport
from commrt.transport.vacant import VacantTransport

__all__ = ["current", "init", "is_open"]

_current: World | None = None
_opened = 0
"""Worlds opened by this process; keeps the keys of one apart from those of the next on the same store."""
_joined: set[tuple[str, int]] = set()
"""The stores where this process has met other ranks."""
_taken: list[object] = []
"""Stores and groups that this process was forked with: its parent is a rank there, so it cannot be one."""


def current() -> World:
    """The world made by the last `init`; raises `UsageError` if there is none."""
    if _current is None or _current.closed:
        raise UsageError("there is no world yet: call commrt.init() first, or pass world=")
    return _current


def is_open() -> bool:
    """True if `current` would give a world."""
    return _current is not None and not _current.closed


def init(timeout_s: float | None = None, *, start_timeout_s: float | None = None) -> World:
    """Join the world this process was launched into, and remember it as the current one.

    In this order: a running ``torch.distributed`` group; torchrun, Open MPI, MPICH or Slurm variables; else a
    world of one. `start_timeout_s` is the deadline for all ranks to come and connect (default: `timeout_s`, but at
    least 300: jobs start unevenly), `timeout_s` that of every later wait (default: COMMRT_TIMEOUT_S, or 300). A second
    call returns the world that is already open; a `timeout_s` given there replaces the first. ``with init():`` ends the
    world unless it is inside another such statement: who opens one without ``with`` takes `current` in functions.

    A process that comes with the number of a rank that is gone, while the others train with backup workers, waits for
    nobody: it takes that place when it attaches its model. Until then it can do nothing together with them.

    Ranks on one Linux host exchange through shared memory, others through Gloo's sockets, both at once where hosts have
    several (``world.transport.kind``); COMMRT_TRANSPORT=shared or gloo, the same on every rank, insists on one.

    A forked child has no part in its parent's world, nor a place of its own in that job: there, ``init`` raises
    `UsageError` unless the launcher's variables have been changed or unset.

    Raises `UsageError` for contradictory variables that it reads, `TransportError` if the other ranks do not come,
    `DisagreementError` if they differ about the size of the world or the transport.
    """
    global _current, _opened
    require_deadlines(timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    if _current is not None and not _current.closed:
        if timeout_s is not None:
            _current.transport.timeout_s = timeout_s
        return _current
    step_limit = default_timeout_s() if timeout_s is None else timeout_s
    start_limit = max(step_limit, DEFAULT_TIMEOUT_S) if start_timeout_s is None else start_timeout_s
    in_group = dist.is_available() and dist.is_initialized()
    launch = None if in_group else launched()  # raises for variables that matter
    _opened += 1
    if in_group:
        _current = _in_running_group(start_limit)
    elif launch is not None and launch.size > 1:
        _current = _launched(launch, start_limit)
    else:
        _current = World(Fabric(1).transport(0), HashStore(), launcher="one process")
    _current.transport.timeout_s = step_limit
    return _current


def _in_running_group(timeout_s: float) -> World:
    rank, size, local = dist.get_rank(), dist.get_world_size(), local_rank()
    if size == 1:
        return World(Fabric(1).transport(0), HashStore(), local, "torch.distributed")
    _require_not_taken(dist.group.WORLD)
    default = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch offers no other way to it
    store = PrefixStore(f"commrt/{_opened}", default)
    connect = _connecting(store, rank)
    transport = connect(0, range(size), timeout_s)
    is_near = transport.kind == "shared"
    means = Means(connect, _towards(None, is_near=is_near))  # a group does not say where the others are
    return World(transport, store, local, "torch.distributed", holds_store=rank == 0, means=means)


def _launched(launch: Launch, timeout_s: float) -> World:
    _require_not_taken((launch.address, launch.port))
    store = PrefixStore(f"commrt/{launch.job}/{launch.attempt}/{_opened}", meet(launch, timeout_s))
    _joined.add((launch.address, launch.port))
    connect = _connecting(store, launch.rank, _listens_at(launch.address))
    config = call_store(lambda: WorldConfig.read(store), STORE_ANSWER_S, launch.rank)
    if config is None:
        transport = connect(0, range(launch.size), timeout_s)
    else:
        config.require_place(launch.rank, launch.size, host_identity(), chosen_transport())
        transport = VacantTransport(launch.rank, range(launch.size), timeout_s)
    is_near = transport.kind == "shared" if config is None else config.host is not None
    return World(
        transport,
        store,
        launch.local_rank,
        launch.launcher,
        holds_store=launch.rank == 0 and not launch.store_exists,
        means=Means(connect, _towards(launch.address, is_near=is_near)),
        config=config,
    )


def _listens_at(address: str) -> str | None:
    """Where Gloo listens: on the way to rank 0; None for where it is told to, or the host's own name leads."""
    if is_loopback(address):
        return LOOPBACK
    ours = own_address(address)
    return None if gloo_interface() or is_loopback(ours) else ours


def _towards(address: str | None, *, is_near: bool) -> str | None:
    """Whence the ranks see each other; None on the host of `address`, which may know itself by a name of its own."""
    if is_near or address is None or is_loopback(address):
        return LOOPBACK if is_near or address else None
    return None if is_loopback(own_address(address)) else address


def _connecting(store: Store, rank: int, host: str | None = None) -> Connect:
    def connect(generation: int, members: Sequence[int], timeout_s: float) -> Transport:
        ours = clone_connection(store) if generation else store  # an earlier attempt may still wait on the first
        shelf = PrefixStore(f"generation {generation}", ours)
        return connect_hosts(shelf, rank, members, timeout_s, host)

    return connect


def _require_not_taken(place: object) -> None:
    if place in _taken:
        raise UsageError(
            "this process was forked from a rank of the same job, and a rank is one process: call init() in one of the "
            "two only, start ranks with a launcher or multiprocessing's spawn, or unset the launcher's variables "
            "(RANK, WORLD_SIZE, ...) in the child for a world of its own"
        )


def _leave() -> None:
    """The process ends, perhaps in the middle of a transfer: do not wait for its deadline.

    With backup workers, others may want this rank's state yet; but not what is left after an error.
    """
    if _current is not None:
        if _current.around != Around() and not hasattr(sys, "last_value"):
            _current.close()
        if failure := _current.untold:
            warnings.warn(f"the process ends after a failure that no call has raised: {failure}", stacklevel=1)
        _current.abort(TransportClosed("the process ended without closing its world"))
        _current.close()


def _after_fork() -> None:
    """In the child; what `_leave` would do there is the parent's business."""
    global _current, _opened
    _current, _opened = None, 0
    _taken.extend(_joined)
    _joined.clear()
    if dist.is_available() and dist.is_initialized():
        _taken.append(dist.group.WORLD)


atexit.register(_leave)
os.register_at_fork(after_in_child=_after_fork)
