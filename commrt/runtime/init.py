# SPDX-License-Identifier: Apache-2.0
"""`init`: a process joins its world by a running group, a launcher's variables, or alone.

It keeps the current world of the process, closes it at exit, and forgets it in a forked child; on
the store it leaves where ranks that come later reach the others. `init` is for one thread at a
time, and alone writes what is kept here, but for the child. Any thread may ask `current` and
`is_open`. After a loss the communication thread connects by `_connected`, which keeps nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence
from threading import Event

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from commrt.errors import DeadlineExceeded, Place, UsageError
from commrt.runtime.connection import (
    Connect,
    ReconnectOptions,
    Start,
    compare_starts,
    connect_hosts,
)
from commrt.runtime.torch_version import check_torch_version
from commrt.runtime.world import World
from commrt.store.addresses import host_identity
from commrt.store.client import call_store, clone_connection
from commrt.store.environment import default_timeout_s, is_on, variable
from commrt.store.launcher import Launch, launched, local_rank
from commrt.store.records import POLL_S
from commrt.store.rendezvous import meet
from commrt.store.world_config import WorldConfig
from commrt.threads.deadline import Deadline, Timeouts, require_deadlines
from commrt.transport.local import Fabric
from commrt.transport.names import chosen_transport
from commrt.transport.null import NullTransport
from commrt.transport.protocol import Transport

_log = logging.getLogger("commrt")
_current: World | None = None
"""The world of the last `init`, perhaps closed."""
_opened = 0
"""Worlds that this process has opened; keeps their keys apart on one store."""
_joined: set[tuple[str, int]] = set()
"""Addresses of the stores where this process has met other ranks."""
_inherited: list[object] = []
"""Addresses and groups of the parent of this forked process.

The parent is a rank there, so the child cannot be one.
"""
TOWARDS = "towards"
"""The key of `Start.towards`, for processes that come later."""


def current() -> World:
    """Return the world of the last `init`; raises `UsageError` if there is none."""
    if _current is None or _current.closed:
        raise UsageError("there is no world yet: call commrt.init() first, or pass world=")
    return _current


def is_open() -> bool:
    """Return True if `current` would return a world."""
    return _current is not None and not _current.closed


def init(
    timeout_s: float | None = None,
    *,
    start_timeout_s: float | None = None,
    up_to: int | None = None,
) -> World:
    """Join the world that this process was launched into, and make it the current one.

    The world is that of a running ``torch.distributed`` group; else that of the variables of
    torchrun, Open MPI, MPICH or Slurm; else a world of one. The ranks of one Linux host exchange
    through shared memory, others through Gloo (``world.transport.kind``); COMMRT_TRANSPORT=shared
    or gloo, the same on every rank, insists on one of them.

    `timeout_s` limits every later wait (default: COMMRT_TIMEOUT_S, or 300). `start_timeout_s`,
    which may not be less, limits the time until all ranks have connected (default: twice
    `timeout_s`, but at least 300: jobs start unevenly). Rank 0 logs all limits that follow from
    them, at level INFO.

    A second call returns the world that is open; a `timeout_s` given there replaces the first.
    ``with init():`` closes the world at its end, unless it is inside another such statement: if you
    open a world without ``with``, use `current` in functions.

    With backup workers, a process may come with the number of a rank that is gone while the others
    train. It waits for nobody, and takes that rank's place when it attaches its model. Until then
    it can do nothing together with them. With `up_to`, the same on all ranks, so may further ranks:
    the launcher starts WORLD_SIZE ranks, and later processes have the same variables but a RANK
    from WORLD_SIZE to `up_to` - 1. One that comes too early waits for the others.

    A forked child is no rank of its parent's job. There ``init`` raises `UsageError`, unless the
    launcher's variables have been changed or unset.

    Raises `UsageError` for contradictory variables, `TransportError` if the other ranks do not
    come, and `DisagreementError` if they differ about the size of the world, `up_to` or the
    transport.
    """
    global _current, _opened
    check_torch_version()
    require_deadlines(timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    if up_to is not None and (isinstance(up_to, bool) or not isinstance(up_to, int)):
        raise UsageError(f"up_to={up_to!r:.80}: give a number of ranks, or leave it out")
    opened = _current if is_open() else None
    if timeout_s is None:
        timeout_s = opened.timeout_s if opened else default_timeout_s()
    timeouts = Timeouts.of(timeout_s, start_timeout_s)
    if opened:
        _require_places(opened.size if up_to is None else up_to, opened)
        opened.transport.timeout_s = timeout_s
        return opened
    in_group = dist.is_available() and dist.is_initialized()
    launch = None if in_group else launched(up_to=up_to)  # raises for contradictory variables
    if up_to is not None:
        _require_room(up_to, launch, in_group=in_group)
    _opened += 1
    if in_group:
        _current = _join_group(timeouts.start_s)
    elif launch is not None and max(launch.size, up_to or 1) > 1:
        _current = _join_launch(launch, timeouts.start_s, up_to)
    else:
        _current = World(Fabric(1).transport(0), HashStore(), launcher="one process")
    _current.transport.timeout_s = timeout_s
    if is_on("COMMRT_LIVE") and _current.size > 1:
        from commrt.runtime.publishing import start_publishing  # noqa: PLC0415  # only if asked

        start_publishing(_current)
    if directory := variable("COMMRT_TRACE"):
        from commrt.runtime.trace_files import record_to  # noqa: PLC0415  # only if asked

        record_to(directory, _current)
    if _current.rank == 0:
        _log.info("commrt: timeouts: %s", timeouts)
    return _current


def _join_group(timeout_s: float) -> World:
    rank = dist.get_rank()
    size = dist.get_world_size()
    local = local_rank()
    if size == 1:
        return World(Fabric(1).transport(0), HashStore(), local, "torch.distributed")
    _require_not_inherited(dist.group.WORLD)
    default = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch offers no other way to it
    store = PrefixStore(f"commrt/{_opened}", default)
    transport, start = _connected(store, rank, 0, range(size), timeout_s)
    options = ReconnectOptions(_connector(store, rank), start.towards)
    return World(
        transport,
        store,
        local,
        "torch.distributed",
        holds_store=rank == 0,
        reconnect_options=options,
    )


def _require_room(up_to: int, launch: Launch | None, *, in_group: bool) -> None:
    """Raise `UsageError` if no ranks could come later, or `up_to` are fewer than there are."""
    if launch is not None and up_to >= launch.size:
        return
    if in_group:
        what = "a group of torch.distributed"
    elif launch is None:
        what = "no launcher"
    else:
        what = f"{launch.size} ranks"
    raise UsageError(
        f"up_to={up_to} with {what}: give the most ranks that there will be, where a launcher"
        " sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def _require_places(places: int, opened: World) -> None:
    if places != opened.size:
        raise UsageError(
            f"up_to={places}, and the world that is open has places for {opened.size} ranks: close"
            " it first"
        )


def _join_launch(launch: Launch, timeout_s: float, up_to: int | None) -> World:
    _require_not_inherited((launch.address, launch.port))
    store = PrefixStore(f"commrt/{launch.job}/{launch.attempt}/{_opened}", meet(launch, timeout_s))
    _joined.add((launch.address, launch.port))
    config = call_store(lambda: WorldConfig.read(store), rank=launch.rank)
    if launch.rank >= launch.size:
        config = config or _wait_for_config(store, launch, timeout_s)
    if config is None:
        transport, start = _connected(store, launch.rank, 0, range(launch.size), timeout_s, up_to)
        towards = start.towards or ""
        call_store(lambda: store.set(TOWARDS, towards), rank=launch.rank)
    else:
        config.require_place(
            launch.rank, launch.size, up_to or launch.size, host_identity(), chosen_transport()
        )
        transport = NullTransport(launch.rank, range(launch.size), timeout_s)
        towards = call_store(lambda: store.get(TOWARDS), rank=launch.rank).decode()
    return World(
        transport,
        store,
        launch.local_rank,
        launch.launcher,
        holds_store=launch.rank == 0 and not launch.store_exists,
        reconnect_options=ReconnectOptions(
            _connector(store, launch.rank, up_to), towards or None, up_to or 0
        ),
        config=config,
    )


def _wait_for_config(store: Store, launch: Launch, timeout_s: float) -> WorldConfig:
    """Return what the first ranks train, once they do."""
    limit = Deadline(timeout_s)
    while limit.left_s > 0:
        if (config := call_store(lambda: WorldConfig.read(store), rank=launch.rank)) is not None:
            return config
        Event().wait(POLL_S)
    raise DeadlineExceeded(
        f"ranks 0 to {launch.size - 1} did not attach a model within "
        f"{timeout_s:g} s: start them first, as rank {launch.rank} comes to their training",
        Place(launch.rank),
    )


def _connected(
    store: Store,
    rank: int,
    generation: int,
    members: Sequence[int],
    timeout_s: float,
    up_to: int | None = None,
) -> tuple[Transport, Start]:
    """Connect `members` for generation `generation`, and return what they told each other."""
    # an earlier attempt may still wait on the first
    ours = clone_connection(store, timeout_s) if generation else store
    part = PrefixStore(f"generation {generation}", ours)
    start = compare_starts(part, rank, members, timeout_s, ("init(up_to=)", str(up_to)))
    return connect_hosts(part, rank, start, timeout_s), start


def _connector(store: Store, rank: int, up_to: int | None = None) -> Connect:
    return lambda number, members, timeout_s: _connected(
        store, rank, number, members, timeout_s, up_to
    )[0]


def _require_not_inherited(place: object) -> None:
    if place in _inherited:
        raise UsageError(
            "this process was forked from a rank of the same job, and a rank is one process: call"
            " init() in one of the two only, start ranks with a launcher or multiprocessing's"
            " spawn, or unset the launcher's variables (RANK, WORLD_SIZE, ...) in the child for a"
            " world of its own"
        )


def _at_exit() -> None:
    if _current is not None:
        _current.ending.end_with_process()


def _after_fork() -> None:
    global _current, _opened
    _current = None
    _opened = 0
    _inherited.extend(_joined)
    _joined.clear()
    if dist.is_available() and dist.is_initialized():
        _inherited.append(dist.group.WORLD)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
