# SPDX-License-Identifier: Apache-2.0
"""NCCL's sends and receives between GPUs: the GPU transport.

Running a bound group issues NCCL's on the calling thread's current stream, and returns when they
are queued; later work on that stream sees what arrived. Bytes travel as NCCL_INT8, so every dtype
works. It is one NCCL group if no rank has many messages, and several otherwise
(`commrt.nccl_groups`): NCCL cuts a large group into kernels, at another place on each rank, and
kernels may then wait for each other for ever. No group of ours is cut (decision 0034).

`commrt.transport.group_watch` has the deadlines and the ends. Only the thread that exchanges, or
later closes, calls here, but for `allocate`, `timeout_s` and `abort`, which are for any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import TransportError, UsageError
from commrt.threads.streams import streams_of
from commrt.transport.bind_checks import split_self
from commrt.transport.group_watch import GroupWatch
from commrt.transport.message_groups import uncut
from commrt.transport.nccl_binding import Binding, load
from commrt.transport.nccl_communicator import create
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport
from commrt.transport.shutdown_notices import ShutdownNotices


class NcclTransport(Transport):
    """One rank of an NCCL communicator; a `Transport` for tensors on `device`.

    By default that is the thread's current one. Connects to all other `members` through a `store`
    that only this communicator uses. Raises `DeadlineExceeded` with the ranks that do not come,
    `UsageError` for an NCCL that cannot be used or a GPU that two ranks chose.

    A group's error is raised by the group, or if it had returned already, by the next group or by
    `close`; then `on_failure` is called first. All groups come from one thread at a time. Other
    communicators of the same GPU, such as ``torch.distributed``'s, need the same order of calls on
    every rank (NVIDIA/nccl#1766).
    """

    kind = "nccl"
    can_move_receives = False

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float = 300.0,
        device: torch.device | None = None,
        binding: Binding | None = None,
        on_failure: Callable[[TransportError], None] | None = None,
    ) -> None:
        self.rank = rank
        self.members = members
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if device is None else device
        )
        self._binding = load() if binding is None else binding
        streams = streams_of(self.device)
        notices = ShutdownNotices(store, rank, timeout_s)
        communicator = create(store, rank, members, timeout_s, self.device, streams, self._binding)
        self.watch = GroupWatch(
            rank, members, timeout_s, streams, communicator, notices, on_failure
        )
        """Its deadlines and its end, also those of windows that `commrt.transport.peers` adds."""

    @property
    def timeout_s(self) -> float:
        """Deadline of one group."""
        return self.watch.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.watch.timeout_s = seconds

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        self.require_device(device or self.device)
        return super().allocate(numel, dtype, self.device)

    allocate_shared = allocate

    def require_device(self, device: torch.device) -> None:
        """Raise `UsageError` for another `device` than this transport's."""
        if device != self.device:
            raise UsageError(
                f"this transport moves tensors on {self.device}, not those on {device}: move them"
                " there"
            )

    def bind(self, group: P2PGroup) -> Exchange:
        """Prepare `group`; two sends and two receives cost 5 us beside NCCL and an event."""
        rest, copies = split_self(group, self.rank, self.members)
        for message in (*group.sends, *group.recvs):
            self.require_device(message.data.device)
        watch = self.watch
        watch.require_open(group.hop)
        send = watch.communicator.nccl.send
        recv = watch.communicator.nccl.recv
        groups = [
            [
                *(self._call(send, each) for each in some.sends),
                *(self._call(recv, each) for each in some.recvs),
            ]
            for some in uncut(rest, self.rank, self.members)
        ]

        def run(tag: Tag) -> None:
            watch.require_open(rest.hop, tag)
            for source, target in copies:
                target.copy_(source)
            if groups and watch.is_capturing:
                self._issue(groups)
            elif groups:
                watch.queue(lambda: self._issue(groups), rest, tag)

        return run

    def _call(self, issue: Callable[..., None], message: P2PMessage) -> Callable[[int], None]:
        nbytes = message.data.nbytes
        nccl_rank = self.members.index(message.peer)
        return partial(issue, message.data.data_ptr(), nbytes, self._binding.NCCL_INT8, nccl_rank)

    def _issue(self, groups: Sequence[Sequence[Callable[[int], None]]]) -> None:
        stream = self.watch.streams.current()
        for calls in groups:
            self._binding.groupStart()
            try:
                for call in calls:
                    call(stream)
            finally:
                self._binding.groupEnd()  # or NCCL would collect all later calls of this thread

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """Record one CUDA graph, which the watchdog treats as one group with all peers."""
        watch = self.watch
        graph = watch.capture(work, group)
        if graph is None:
            return None

        def replay(tag: Tag, _kept: object = work) -> None:  # with all memory that the graph uses
            watch.require_open(group.hop, tag)
            watch.queue(graph.replay, group, tag)

        return replay

    def wait(self) -> None:
        self.watch.wait()

    def close(self) -> None:
        """Wait for all queued groups, then free the communicator, even after an error."""
        self.watch.close()

    def abort(self) -> None:
        """End what is queued and free the communicator; callable from any thread."""
        self.watch.abort()
