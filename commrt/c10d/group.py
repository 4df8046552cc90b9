# SPDX-License-Identifier: Apache-2.0
"""One process group of torch.distributed: a world of its own, from its begin to its end.

The thread that makes a group connects it, and any thread may end it. Two lists of the process are
kept here: open groups, all of which end with the program, and groups whose owner is gone, which a
thread of its own closes.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet, finalize

from torch.distributed import PrefixStore

from commrt.c10d.call_engine import CallEngine
from commrt.c10d.call_options import kept_seconds_of
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.connecting import connect, unused_part
from commrt.c10d.device_messages import DeviceMessages
from commrt.c10d.dist_errors import as_dist_error
from commrt.c10d.host_messages import HostMessages
from commrt.errors import CommrtError, TransportClosed
from commrt.runtime.torch_version import check_torch_version
from commrt.runtime.world import World
from commrt.store.client import call_store
from commrt.store.keys import delete_keys
from commrt.store.launcher import local_rank
from commrt.threads.calls import start_call
from commrt.threads.comm_thread import EXIT_S
from commrt.threads.deadline import require_deadlines
from commrt.threads.starting import start_thread
from commrt.transport.gloo import GlooTransport

CONNECT_TRIES = 5
"""Of Gloo to connect two ranks (torch 2.13), each with its own timeout.

A late or dead peer takes all of them.
"""


class ProcessGroupWorld:
    """The world of the group that torch asks for in `options`, a ``_DistributedBackendOptions``.

    Collective to make. Its parts are made once, and called by `Methods` on the caller's threads;
    only `set_timeout` writes to them.
    """

    def __init__(self, options: Any) -> None:
        check_torch_version()
        rank = options.group_rank
        size = options.group_size
        timeout_s = kept_seconds_of(options.timeout)
        global_ranks = list(options.global_ranks_in_group) or list(range(size))
        require_deadlines(timeout=timeout_s)
        self.store = unused_part(options.store, rank, size)
        """The group's own part of torch's store."""
        transport, host, selection = connect(self.store, rank, size, timeout_s, global_ranks)
        self.world = World(transport, self.store, local_rank(), "torch.distributed")
        self.requests = CheckedCalls(rank, size)
        """Makes calls for the engine of what torch passes."""
        self.engine = CallEngine(self.world, selection, options.group_id)
        # A receive from any rank reads all ranks' addresses from the store, so all must be there
        # from the start.
        self.gloo = GlooTransport(
            PrefixStore("messages", self.store),
            rank,
            range(size),
            timeout_s / CONNECT_TRIES,
            host,
            lazy=True,
        )
        self.host_messages = HostMessages(self.gloo, self.world)
        self.device_messages = DeviceMessages(self.world)
        self.set_timeout(timeout_s)
        self._finalizer: Any = None
        _OPEN.add(self)

    def close_with(self, owner: object) -> None:
        """Close this group, as `close` does, when `owner`, the object that torch holds, is gone."""
        _start_closing_dropped()
        # a queue takes it amid garbage collection, too
        self._finalizer = finalize(owner, _dropped.put, self)
        self._finalizer.atexit = False

    def set_timeout(self, timeout_s: float) -> None:
        """Give later collectives, sends and receives another deadline. Any thread may do so."""
        require_deadlines(timeout=timeout_s)
        self.world.transport.timeout_s = timeout_s
        self.engine.timeout_s = timeout_s
        self.host_messages.timeout_s = timeout_s
        gloo = self.gloo.process_group
        if gloo is not None:  # else this group was closed
            gloo._set_default_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  # torch's name

    def close(self, limit_s: float | None = None) -> None:
        """Finish what was started, sends within `limit_s`, then close; safe to call twice."""
        if self._finalizer is not None:
            self._finalizer.detach()
        try:
            self.world.close()
        except CommrtError as error:
            _OPEN.discard(self)
            self.host_messages.close()
            raise as_dist_error(error) from error.__cause__
        _OPEN.discard(self)
        if self.world.comm_thread.failure is None:
            self.host_messages.finish_sends(limit_s)
            if _OPEN:  # else the store may end any moment, with the process that holds it
                self._delete_keys()
        self.host_messages.close()

    def _delete_keys(self) -> None:
        """Delete what this group has left on the store, if all other ranks have closed it."""

        def leave() -> None:
            if self.store.add("closed", 1) == self.world.size:
                delete_keys(self.store)

        with suppress(CommrtError, RuntimeError):  # the store is gone, with all that it held
            call_store(leave, rank=self.world.rank)

    def abort(self, reason: str = "the process group was aborted") -> None:
        """End what is in flight with an error that says `reason`; call `close` too."""
        self.world.abort(TransportClosed(reason))
        self.host_messages.close()


_OPEN: WeakSet[ProcessGroupWorld] = WeakSet()
"""Groups from their making to their end."""
_dropped: SimpleQueue[ProcessGroupWorld] = SimpleQueue()
"""Groups whose owner is gone, to be closed: any thread puts, at any place, and one gets."""


@cache
def _start_closing_dropped() -> None:
    start_thread(_close_dropped, "commrt-dropped-groups")


os.register_at_fork(after_in_child=_start_closing_dropped.cache_clear)


def _close_dropped() -> None:
    while True:
        start_call(_dropped.get().close)  # which may take as long as a collective of the group


def _at_exit() -> None:
    """End all groups that the program has left open, without waiting for running collectives.

    What was sent still arrives, if its receiver comes soon.
    """
    for group in tuple(_OPEN):
        if group.world.comm_thread.failure is None:
            group.host_messages.finish_sends(EXIT_S)
        group.world.abort(TransportClosed("the process ended without destroying its process group"))
        with suppress(TimeoutError, CommrtError):  # the others are to be ended too
            group.world.comm_thread.close(EXIT_S)
            group.close(EXIT_S)


atexit.register(_at_exit)
