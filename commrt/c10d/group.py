# SPDX-License-Identifier: Apache-2.0
"""One process group of torch.distributed: a world of its own, its collectives, and its sends and
receives.

Two ranks send and receive in any order, with tags, beside the collectives. CPU tensors travel on
sockets of Gloo, which connects two ranks when they first exchange. Tensors on a GPU travel through
NCCL, in batches: all sends and receives since the last wait are one group, as NCCL has no tags. A
batch leaves when one of its works is waited for, or a collective begins. The first use of a GPU by
a group connects all its ranks, so all must take part in it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, lru_cache
from math import inf
from queue import SimpleQueue
from typing import Any, cast
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.c10d.group_work import NO_TIMEOUT, GroupWork, as_dist_error, seconds_of
from commrt.errors import (
    CommrtError,
    DeadlineExceeded,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import PROVEN_RANKS, Selection, parse_forced
from commrt.runtime.connection import compare_starts, connect_hosts, listening_address, local_rank
from commrt.runtime.torch_version import check_torch_version
from commrt.runtime.world import World
from commrt.store.agreement import gather
from commrt.store.client import call_store
from commrt.store.keys import delete_keys
from commrt.store.launcher import LOOPBACK, is_on, variable
from commrt.threads.comm_thread import EXIT_S
from commrt.threads.deadline import Deadline, require_deadlines
from commrt.threads.future import Future, start_call
from commrt.threads.starting import start_thread
from commrt.transport.gloo import GlooTransport
from commrt.transport.local import Fabric
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag, Transport

_log = logging.getLogger("commrt")
CHOICES = "COMMRT_CLUSTER, COMMRT_SCHEDULES or COMMRT_SAME_BITS"
CONNECT_TRIES = 5
"""Of Gloo to connect two ranks (torch 2.13), each with its own timeout.

A late or dead peer takes all of them.
"""
SHORTEST_S = 0.001
"""The shortest timeout of a wait that torch does not take for the group's own."""


def group_devices() -> list[torch.device]:
    """Return the kinds of devices whose tensors a group takes."""
    return [
        torch.device(kind) for kind in (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    ]


class ProcessGroupWorld:
    """The world of the group that torch asks for in `options`, a ``_DistributedBackendOptions``.

    Collective to make.
    """

    def __init__(self, options: Any) -> None:
        check_torch_version()
        rank = options.group_rank
        size = options.group_size
        timeout_s = options.timeout.total_seconds()
        global_ranks = list(options.global_ranks_in_group) or list(range(size))
        require_deadlines(timeout=timeout_s)
        self.store = _unused(options.store, rank, size)
        transport, host, selection = _connect(self.store, rank, size, timeout_s, global_ranks)
        self.world = World(transport, self.store, local_rank(), "torch.distributed")
        self.requests = CheckedCalls(rank, size)
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
        """Close this group, as `close` does, when `owner` is gone: the object that torch holds, or
        whoever has one.
        """
        _start_closing_dropped()
        # a queue takes it amid garbage collection, too
        self._finalizer = finalize(owner, _dropped.put, self)
        self._finalizer.atexit = False

    def set_timeout(self, timeout_s: float) -> None:
        """Give later collectives, sends and receives another deadline."""
        require_deadlines(timeout=timeout_s)
        self.world.transport.timeout_s = self.engine.timeout_s = self.host_messages.timeout_s = (
            timeout_s
        )
        if (gloo := self.gloo.process_group) is not None:  # else this group was closed
            gloo._set_default_timeout(timedelta(seconds=timeout_s))  # noqa: SLF001  # torch's name

    def close(self, limit_s: float | None = None) -> None:
        """Finish what was started, sends within `limit_s` if one is given, then close all
        connections.

        Safe to call twice.
        """
        if self._finalizer is not None:
            self._finalizer.detach()
        try:
            self.world.close()
        except CommrtError as error:
            as_dist_error(error)
            raise
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


class HostMessages:
    """Sends and receives of CPU tensors. Used by any thread.

    Gloo takes a message back if nobody references its work. So works that the caller drops before
    they end are kept until they do, or until their timeout.
    """

    def __init__(self, gloo: GlooTransport, world: World) -> None:
        self._gloo = gloo
        self._world = world
        self._sends: WeakSet[HostWork] = WeakSet()
        self._dropped_sends = DroppedWorks()
        self._dropped_receives = DroppedWorks()
        self.timeout_s = world.timeout_s
        """Of what is waited for from now on.

        Gloo connects two ranks within the timeout that the group began with.
        """

    def post(self, data: Tensor, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        """Begin to send `data` to `peer`, or to receive it from there; from any rank if `peer` is
        None.
        """
        what = f"{'send' if is_send else 'receive'} with tag {tag}"
        place = Place(self._world.rank, peer, bucket=what, nbytes=data.nbytes)
        self._dropped_sends.start_waiting()
        self._dropped_receives.start_waiting()
        try:
            begun = self._gloo.post(data, peer, tag, is_send=is_send)
        except RuntimeError as error:
            raise self.explained(error, place) from error
        work = HostWork(
            self, begun, data, place, self._dropped_sends if is_send else self._dropped_receives
        )
        if is_send:
            self._sends.add(work)
        return work

    def finish_sends(self, limit_s: float | None = None) -> None:
        """Wait until all sends have ended, in an error too; at most `limit_s`, or else each for its
        timeout.
        """
        deadline = Deadline(inf if limit_s is None else limit_s)
        for work in [work for work in self._sends if not work.was_waited_for]:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(min(self.timeout_s, deadline.left_s), SHORTEST_S)))
        waiting = self._dropped_sends.start_waiting()
        with suppress(TimeoutError):
            waiting.result(limit_s and max(deadline.left_s, 0.0))

    def explained(self, error: RuntimeError, place: Place) -> TransportError:
        """Return what Gloo's `error` means.

        It may say only that connecting took too long, to a rank that is gone.
        """
        ended = self._world.comm_thread.failure
        if isinstance(ended, TransportClosed):  # aborted or reconfigured here
            return TransportClosed(ended.what, place)
        is_gone = (
            isinstance(ended, PeerLost)
            and place.peer is not None
            and ended.place.peer == place.peer
        )
        is_late = "imed out" in str(error) or "imeout" in str(error)
        # "Connection refused": nobody listens
        if is_late and not is_gone and "refused" not in str(error):
            what = "the peer did not do its part in time: slow, stopped, or running another program"
            return DeadlineExceeded(what, place)
        return PeerLost(
            "the connection to the peer broke: its process ended or gave up; look at its own"
            " output",
            place,
        )

    def close(self) -> None:
        """Close all connections."""
        self._gloo.close()


class DroppedWorks:
    """Works of Gloo that nobody waits for any more, which are kept until they end."""

    def __init__(self) -> None:
        self._kept: deque[tuple[dist.Work, Tensor, float]] = deque()
        self._waiting: Future[None] = Future()
        self._waiting.set_result(None)

    def keep(self, work: dist.Work, data: Tensor, timeout_s: float) -> None:
        """Keep a work that was dropped.

        Starts nothing, since garbage may be collected at any place.
        """
        self._kept.append((work, data, timeout_s))

    def start_waiting(self) -> Future[None]:
        """Wait for all works that are kept, on a thread of its own;
        return the future of their end.
        """
        if self._kept and self._waiting.done():
            self._waiting = start_call(self._wait)
        return self._waiting

    def _wait(self) -> None:
        while self._kept:
            work, _, timeout_s = self._kept[0]
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=timeout_s))
            self._kept.popleft()


class HostWork(dist.Work):
    """A send or a receive of Gloo, with errors that name the peer.

    If it is dropped before its end, it is `kept`.
    """

    def __init__(
        self,
        messages: HostMessages,
        work: dist.Work,
        data: Tensor,
        place: Place,
        kept: DroppedWorks,
    ) -> None:
        super().__init__()
        self._messages = messages
        self._work = work
        self._data = data
        self._place = place
        self._timeout_s = messages.timeout_s
        self._kept = kept
        self.was_waited_for = False
        """Gloo would wait a second time for another message of its kind."""

    def __del__(self) -> None:
        if not self.was_waited_for:
            self._kept.keep(self._work, self._data, self._timeout_s)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when it is done; see `GroupWork.wait`."""
        try:
            return self._work.wait(timedelta(seconds=seconds_of(timeout) or self._timeout_s))
        except RuntimeError as error:
            raise as_dist_error(self._messages.explained(error, self._place)) from error
        finally:
            self.was_waited_for = True

    def is_completed(self) -> bool:
        """Return True if it is done. Never waits."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return True unless it has ended in an error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return the error in which it has ended, None while there is none. Never waits."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """Return the tensor that was sent or received."""
        return [self._data]

    def source_rank(self) -> int:
        """Return the rank that a receive from any rank had its data from."""
        return self._work._source_rank()  # noqa: SLF001  # torch calls both

    _source_rank = source_rank


class DeviceMessages:
    """Sends and receives of tensors on a GPU, batched until somebody waits.

    Used by the thread that calls.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sends: list[P2PMessage] = []
        self._recvs: list[P2PMessage] = []
        self.waiting: list[BatchWork] = []

    def post(self, data: Tensor, peer: int | None, *, is_send: bool) -> dist.Work:
        """Add a send to `peer`, or a receive from there, to the batch."""
        if peer is None:
            raise UsageError(
                "a receive from any rank needs CPU tensors, as NCCL has none: name the source"
            )
        self._world.connect(data.device)
        (self._sends if is_send else self._recvs).append(P2PMessage(peer, data.view(-1)))
        self.waiting.append(BatchWork(self, data))
        return self.waiting[-1]

    def flush(self) -> None:
        """Let the batch leave, if there is one."""
        if self.waiting:
            group = P2PGroup(self._sends, self._recvs)
            works = self.waiting
            tag = Tag(0, "send and receive")
            try:
                future = self._world.comm_thread.submit(
                    lambda: self._world.transport.bind(group)(tag)
                )
            except TransportClosed as error:
                future = Future()
                future.set_exception(error)  # which each wait raises
            self._sends = []
            self._recvs = []
            self.waiting = []
            for work in works:
                work.future = future


class BatchWork(GroupWork):
    """A send or a receive in a batch, which leaves when somebody asks for it."""

    future: Future[Any] | None = None
    """Of the batch, once that has left."""

    def __init__(self, messages: DeviceMessages, data: Tensor) -> None:
        super().__init__(None, [data], "the message")
        self._messages = messages
        self._is_observed = False

    def _task(self) -> Future[Any]:
        if self.future is None:
            self._messages.flush()
        return cast("Future[Any]", self.future)


def _unused(store: Store, rank: int, size: int) -> Store:
    """Return a part of `store` in which nothing stands yet, the same on all ranks of the group.

    The store of a launcher outlives the groups of a process, and torch gives later ones the same
    names.
    """
    counter = f"starts of {size}"
    earlier = (call_store(lambda: store.add(counter, 1), rank=rank) - 1) // size
    return PrefixStore(f"{counter}/{earlier}", store)


def _connect(
    store: Store, rank: int, size: int, timeout_s: float, global_ranks: Sequence[int]
) -> tuple[Transport, str | None, Selection]:
    given = variable("COMMRT_CLUSTER")
    forced = parse_forced(variable("COMMRT_SCHEDULES"), same_bits=is_on("COMMRT_SAME_BITS"))
    cluster = Cluster.named(given or "host")
    if size == 1:
        return Fabric(1).transport(0), LOOPBACK, _selection(cluster, [0], forced)
    choice = json.dumps([cluster.text() if given else "", sorted(forced.items())])
    start = compare_starts(store, rank, range(size), timeout_s, (CHOICES, choice))
    transport = connect_hosts(store, rank, start, timeout_s)
    address = LOOPBACK if transport.one_host else listening_address(start)
    hosts = [*start.hosts.values()]
    # no rank goes on, and perhaps ends, while others still connect to it
    if not transport.one_host:
        gather(PrefixStore("connected", store), rank, range(size), None, timeout_s, json.loads)
    if given:
        return transport, address, _selection(cluster, global_ranks, forced)
    per_host = max(map(hosts.count, hosts))
    return (
        transport,
        address,
        _selection(replace(cluster, gpus_per_node=per_host), _places(hosts, per_host), forced),
    )


def _selection(cluster: Cluster, ranks: Sequence[int], forced: Mapping[str, str]) -> Selection:
    """Return the same object for a group of the same places, as after a reconfiguration: it knows
    its choices.
    """
    return _selection_of(cluster.text(), cluster.name, tuple(ranks), tuple(forced.items()))


@lru_cache(64)
def _selection_of(
    text: str, name: str, ranks: tuple[int, ...], forced: tuple[tuple[str, str], ...]
) -> Selection:
    if len(ranks) > PROVEN_RANKS:
        _log.info(
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


_OPEN: WeakSet[ProcessGroupWorld] = WeakSet()
_dropped: SimpleQueue[ProcessGroupWorld] = SimpleQueue()
"""Groups whose owner is gone, to be closed."""


@cache
def _start_closing_dropped() -> None:
    start_thread(_close_dropped, "commrt-dropped-groups")


os.register_at_fork(after_in_child=_start_closing_dropped.cache_clear)


def _close_dropped() -> None:
    while True:
        start_call(_dropped.get().close)  # which may take as long as a collective of the group


def _at_exit() -> None:
    """End all groups that the program has left open, without waiting for the deadline of a running
    collective.

    What was sent still arrives, if its receiver comes soon.
    """
    for group in tuple(_OPEN):
        if group.world.comm_thread.failure is None:
            group.host_messages.finish_sends(EXIT_S)
        group.world.abort(TransportClosed("the process ended without destroying its process group"))
        with suppress(TimeoutError):
            group.world.comm_thread.close(EXIT_S)
            group.close(EXIT_S)


atexit.register(_at_exit)
