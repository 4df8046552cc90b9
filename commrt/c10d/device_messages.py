# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of a process group's tensors on a GPU, through NCCL, in batches.

All sends and receives since the last wait are one group, as NCCL has no tags. A batch leaves when
one of its works is waited for, or a collective begins. The first use of a GPU by a group connects
all its ranks, so all must take part in it. Threads of the caller collect the batch and let it
leave; nothing is locked, so they must take turns. The communication thread runs it.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from commrt.c10d.group_work import GroupWork
from commrt.errors import TransportClosed, UsageError
from commrt.runtime.world import World
from commrt.threads.future import Future
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag


class DeviceMessages:
    """Sends and receives of tensors on a GPU, batched until somebody waits; see the module."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sends: list[P2PMessage] = []
        self._recvs: list[P2PMessage] = []
        self.waiting: list[BatchWork] = []
        """Works of the batch that has not left. Others only look whether there are any."""

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
    """A send or a receive in a batch.

    Replaces `_task` of its parent, which all its methods call on the thread of their caller: the
    batch leaves then. Sets `_is_observed` of it.
    """

    future: Future[Any] | None = None
    """Of the batch, once that has left: set once, by `DeviceMessages.flush`; read by any thread."""

    def __init__(self, messages: DeviceMessages, data: Tensor) -> None:
        super().__init__(None, [data], "the message")
        self._messages = messages
        self._is_observed = False  # unlike other works that have no future when they are made

    def _task(self) -> Future[Any]:
        if self.future is None:
            self._messages.flush()
        return cast("Future[Any]", self.future)
