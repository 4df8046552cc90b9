# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between two ranks of a group: in any order, with tags, beside its collectives.

CPU tensors travel on sockets of Gloo, which connects two ranks when they first exchange. Tensors on a GPU travel
through NCCL, in batches: all sends and receives since the last wait are one group, as NCCL has no tags. A batch leaves
when one of its works is waited for, or a collective begins. The first use of a GPU by a group connects all its ranks,
so all must take part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from commrt.c10d.group_work import NO_TIMEOUT, GroupWork, as_dist_error, seconds_of
from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError, UsageError
from commrt.runtime.world import World
from commrt.threads.future import Future
from commrt.transport.gloo import GlooTransport
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag


class HostMessages:
    """Sends and receives of CPU tensors. Used by any thread."""

    def __init__(self, gloo: GlooTransport, world: World) -> None:
        self._gloo, self._world = gloo, world
        self.timeout_s = world.timeout_s
        """Of what is waited for from now on. Gloo connects two ranks within the timeout that the group began with."""

    def post(self, data: Tensor, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        """Begin to send `data` to `peer`, or to receive it from there; from any rank if `peer` is None."""
        place = Place(
            self._world.rank, peer, bucket=f"{'send' if is_send else 'receive'} with tag {tag}", nbytes=data.nbytes
        )
        try:
            work = self._gloo.post(data, peer, tag, is_send=is_send)
        except RuntimeError as error:
            raise self.explained(error, place) from error
        return HostWork(work, data, partial(self.explained, place=place), self.timeout_s)

    def explained(self, error: RuntimeError, place: Place) -> TransportError:
        """Return what Gloo's `error` means. It may say only that connecting took too long, to a rank that is gone."""
        ended = self._world.comm_thread.failure
        is_gone = isinstance(ended, PeerLost) and place.peer is not None and ended.place.peer == place.peer
        is_late = "imed out" in str(error) or "imeout" in str(error)
        if is_late and not is_gone and "refused" not in str(error):  # "Connection refused": nobody listens
            what = "the peer did not do its part in time: slow, stopped, or running another program"
            return DeadlineExceeded(what, place)
        return PeerLost("the connection to the peer broke: its process ended or gave up; look at its own output", place)

    def close(self) -> None:
        """Close all connections."""
        self._gloo.close()


class HostWork(dist.Work):
    """A send or a receive of Gloo, with errors that name the peer."""

    def __init__(
        self, work: dist.Work, data: Tensor, explained: Callable[[RuntimeError], TransportError], timeout_s: float
    ) -> None:
        super().__init__()
        self._work, self._data, self._explained, self._timeout_s = work, data, explained, timeout_s

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when it is done; see `GroupWork.wait`."""
        try:
            return self._work.wait(timedelta(seconds=seconds_of(timeout) or self._timeout_s))
        except RuntimeError as error:
            raise as_dist_error(self._explained(error)) from error

    def is_completed(self) -> bool:
        """Return True if it is done. Never waits."""
        return self._work.is_completed()

    def result(self) -> list[Tensor]:
        """Return the tensor that was sent or received."""
        return [self._data]

    def source_rank(self) -> int:
        """Return the rank that a receive from any rank had its data from."""
        return self._work._source_rank()  # noqa: SLF001  # torch calls both

    _source_rank = source_rank


class DeviceMessages:
    """Sends and receives of tensors on a GPU, batched until somebody waits. Used by the thread that calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sends: list[P2PMessage] = []
        self._recvs: list[P2PMessage] = []
        self.waiting: list[BatchWork] = []
        """The works of the batch, which has yet to leave."""

    def post(self, data: Tensor, peer: int | None, *, is_send: bool) -> dist.Work:
        """Add a send to `peer`, or a receive from there, to the batch."""
        if peer is None:
            raise UsageError("a receive from any rank needs CPU tensors, as NCCL has none: name the source")
        self._world.connect(data.device)
        (self._sends if is_send else self._recvs).append(P2PMessage(peer, data.view(-1)))
        self.waiting.append(BatchWork(self, data))
        return self.waiting[-1]

    def flush(self) -> None:
        """Let the batch leave, if there is one."""
        if self.waiting:
            group, works = P2PGroup(self._sends, self._recvs), self.waiting
            tag = Tag(0, "send and receive")
            try:
                future = self._world.comm_thread.submit(lambda: self._world.transport.bind(group)(tag))
            except TransportClosed as error:
                future = Future()
                future.set_exception(error)  # which each wait raises
            self._sends, self._recvs, self.waiting = [], [], []
            for work in works:
                work.future = future


class BatchWork(GroupWork):
    """A send or a receive in a batch, which leaves when somebody asks for it."""

    future: Future[Any] | None = None
    """Of the batch, once that has left."""

    def __init__(self, messages: DeviceMessages, data: Tensor) -> None:
        super().__init__(None, [data], "the message")
        self._messages, self._is_observed = messages, False

    def _task(self) -> Future[Any]:
        if self.future is None:
            self._messages.flush()
        return cast("Future[Any]", self.future)
