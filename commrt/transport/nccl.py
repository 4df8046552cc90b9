# SPDX-License-Identifier: Apache-2.0
"""NCCL's sends and receives between GPUs: the GPU transport.

Running a bound group issues NCCL's on the calling thread's current stream, and returns when they
are queued; later work on that stream sees what arrived. Bytes travel as NCCL_INT8, so every dtype
works. It is one NCCL group if no rank has many messages, and several otherwise
(`program.nccl_groups`): NCCL cuts a large group into kernels, at another place on each rank, and
kernels may then wait for each other for ever. No group of ours is cut (decision 0034).

NCCL has no deadlines, and no rank learns from it that another has given up (NVIDIA/nccl#279). A
watchdog thread enforces the deadlines, reads from the store which ranks have left, and aborts the
communicator to end what waits in it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import sleep

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import (
    DeadlineExceeded,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.threads.calls import start_call
from commrt.threads.deadline import clock
from commrt.threads.forking import release_in_forked_child
from commrt.threads.future import Future
from commrt.threads.streams import DONE, StreamEvent, streams_of
from commrt.transport.nccl_communicator import (
    Binding,
    Communicator,
    ShutdownNotices,
    create,
    load,
    uncut,
    watch,
)
from commrt.transport.protocol import Exchange, P2PGroup, P2PMessage, Tag, Transport, split_self

READ_NOTICES_S = 0.1
"""Age of a pending group from which the store is read for ranks that have left."""
MAX_PENDING = 256
"""Exchanges, of one group each but for wide hops; too many fill NCCL's queues, and it hangs
(NVIDIA/nccl#2353).
"""
POLL_S = 0.0005
"""Between two looks at a pending group that is waited for."""
FREE_S = 10.0
"""Time to free a communicator: other ranks of this host must come, and what is queued must end."""
HELD_UP = (
    "the stream is held up by something else: is another library's collective waiting on this GPU"
)
BUSY_S = 0.2
"""Time that an abort waits for a call in progress: a first exchange may wait inside of it."""

CAPTURE = Tag(-1, "graph")
"""In errors, for a group that is being captured."""
Graphs = weakref.WeakSet["torch.cuda.CUDAGraph"]


@dataclass(slots=True, eq=False)
class Pending:
    """A group that has begun and may not be complete."""

    group: P2PGroup
    tag: Tag
    begin_s: float
    timeout_s: float
    counts: dict[int, int]
    """Number of groups begun with each peer so far, this one included."""
    end: StreamEvent | None = None
    """End of the group on the stream; None while its calls are being issued."""

    @property
    def is_over(self) -> bool:
        """Return True if the group is complete; raises `RuntimeError` if the GPU has failed."""
        return self.end is not None and self.end.query()


class NcclTransport(Transport):
    """One rank of an NCCL communicator; a `Transport` for tensors on `device`, the thread's current
    one by default.

    Connects to all other `members` through a `store` that only this communicator uses. Raises
    `DeadlineExceeded` with the ranks that do not come, `UsageError` for an NCCL that cannot be used
    or a GPU that two ranks chose.

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
        self.timeout_s = timeout_s
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if device is None else device
        )
        self._nccl = load() if binding is None else binding
        self._streams = streams_of(self.device)
        self._notices = ShutdownNotices(store, rank)
        self._on_failure = on_failure
        self._pending: deque[Pending] = deque()
        self._counts = dict.fromkeys(members, 0)
        """How often this rank began to exchange with each peer."""
        self._in_use = threading.Lock()
        """Held during calls of the communicator, so that it is not freed meanwhile."""
        self._failing = threading.Lock()
        self._failure: TransportError | None = None
        self._raised = False  # whether a caller has got the failure
        self._closed = self._capturing = False
        self._communicator = create(
            store, rank, members, timeout_s, self.device, self._streams, self._nccl
        )
        self._graphs = Graphs()
        """To be freed before the communicator, which waits for them."""
        self._freeing = watch(self._check, self._streams.use)
        self._abandon = weakref.finalize(
            self, _abandon, self._freeing, self._in_use, self._graphs, self._communicator
        )
        release_in_forked_child(self)

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        self._require_device(device or self.device)
        return super().allocate(numel, dtype, self.device)

    allocate_shared = allocate

    def bind(self, group: P2PGroup) -> Exchange:
        """Prepare `group`; two sends and two receives cost the host 5 us, without NCCL's own time
        and an event.
        """
        rest, copies = split_self(group, self.rank, self.members)
        for message in (*group.sends, *group.recvs):
            self._require_device(message.data.device)
        self._require_open(group.hop)
        send = self._communicator.send
        recv = self._communicator.recv
        groups = [
            [
                *(self._call(send, each) for each in some.sends),
                *(self._call(recv, each) for each in some.recvs),
            ]
            for some in uncut(rest, self.rank, self.members)
        ]

        def run(tag: Tag) -> None:
            self._require_open(rest.hop, tag)
            for source, target in copies:
                target.copy_(source)
            if groups and self._capturing:
                self._issue(groups)
            elif groups:
                self._queue(lambda: self._issue(groups), rest, tag)

        return run

    def _call(self, issue: Callable[..., None], message: P2PMessage) -> Callable[[int], None]:
        nbytes = message.data.nbytes
        nccl_rank = self.members.index(message.peer)
        return partial(issue, message.data.data_ptr(), nbytes, self._nccl.NCCL_INT8, nccl_rank)

    def _queue(self, issue: Callable[[], None], group: P2PGroup, tag: Tag) -> None:
        """Call `issue`, which queues `group`, and let the watchdog enforce the deadline."""
        peers = group.peers
        for peer in peers:
            self._counts[peer] += 1
        pending = Pending(
            group, tag, clock.now_s(), self.timeout_s, {peer: self._counts[peer] for peer in peers}
        )
        self._pending.append(pending)
        try:
            with suppress(IndexError):  # fewer are pending
                self._wait_for(self._pending[-1 - MAX_PENDING])
            with self._in_use:
                self._require_open(group.hop, tag)  # the watchdog may have aborted it
                issue()
            pending.end = self._streams.record_event()
        except (
            RuntimeError,
            KeyError,
        ) as error:  # KeyError: CuPy has no name for NCCL's statuses above 6
            raise self._explained(error, pending) from error
        finally:
            pending.end = pending.end or DONE

    def _issue(self, groups: Sequence[Sequence[Callable[[int], None]]]) -> None:
        stream = self._streams.current()
        for calls in groups:
            self._nccl.groupStart()
            try:
                for call in calls:
                    call(stream)
            finally:
                self._nccl.groupEnd()  # or NCCL would only collect all later calls of this thread

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """Record one CUDA graph, which the watchdog treats as one group with all peers."""
        pending = Pending(group, CAPTURE, clock.now_s(), self.timeout_s, {})
        self._pending.append(pending)  # NCCL may wait for the peers during the capture
        self._capturing = True
        try:
            with self._in_use:
                self._require_open(group.hop)
                if (graph := self._streams.capture(work)) is not None:
                    self._graphs.add(graph)
        except (RuntimeError, KeyError) as error:
            if self._failure is not None or self._closed:
                raise self._explained(error, pending) from error
            raise RuntimeError(str(error)) from error
        finally:
            self._capturing = False
            pending.end = DONE
        return None if graph is None else self._replay_of(graph, work, group)

    def _replay_of(
        self, graph: torch.cuda.CUDAGraph, work: Callable[[], None], group: P2PGroup
    ) -> Exchange:
        def replay(tag: Tag, _kept: object = work) -> None:  # with all memory that the graph uses
            self._require_open(group.hop, tag)
            self._queue(graph.replay, group, tag)

        return replay

    def _require_open(self, hop: int, tag: Tag | None = None) -> None:
        if self._failure is not None:
            raise self._raising(self._failure)
        if self._closed:
            place = tag.place(self.rank, hop) if tag else Place(self.rank, hop=hop)
            raise TransportClosed("the transport was closed", place)

    def _require_device(self, device: torch.device) -> None:
        if device != self.device:
            raise UsageError(
                f"this transport moves tensors on {self.device}, not those on {device}: move them"
                " there"
            )

    def _explained(self, error: Exception, pending: Pending) -> TransportError:
        """Return the reason for an error of NCCL, which only says that a group has ended."""
        place = self._place(pending)
        what = (
            f"NCCL refused the transfers ({error}): run with NCCL_DEBUG=WARN; the ranks may run"
            " different programs"
        )
        # no effect if it has failed or was closed: then that is the reason
        self._fail(TransportError(what, place))
        if self._failure is not None:
            return self._raising(self._failure)
        return TransportClosed("this rank gave the transport up during the transfer", place)

    def _raising(self, failure: TransportError) -> TransportError:
        self._raised = True
        return failure

    def _place(self, pending: Pending) -> Place:
        """Return the place of the first receive, or send:
        NCCL does not report which peer is late.
        """
        for first in (*pending.group.recvs, *pending.group.sends):
            return pending.tag.place(self.rank, pending.group.hop, first.peer, first.data.nbytes)
        return pending.tag.place(self.rank, pending.group.hop)

    def _check(self) -> None:
        """Abort the communicator if something has failed or is late; called by the watchdog."""
        try:
            while self._pending and self._pending[0].is_over:
                self._pending.popleft()
            failure = self._find_failure()
        except (RuntimeError, KeyError) as error:
            what = f"the GPU or NCCL failed ({error}): look at the output of all ranks"
            failure = TransportError(
                what, self._place(self._pending[0]) if self._pending else Place(self.rank)
            )
        if failure is not None and self._fail(failure) and self._on_failure is not None:
            self._on_failure(failure)

    def _find_failure(self) -> TransportError | None:
        """Return why what is queued cannot complete, if that is known; raises NCCL's own errors."""
        if self._in_use.acquire(blocking=False):  # a call in progress reports its own errors
            try:
                if self._failure is None and not self._closed:
                    self._communicator.check_async_error()
            finally:
                self._in_use.release()
        if not self._pending:
            return None
        pending = self._pending[0]
        age_s = clock.now_s() - pending.begin_s
        if age_s > pending.timeout_s:
            what = (
                f"no transfer with ranks {sorted(pending.group.peers)} within"
                f" {pending.timeout_s:g} s"
            )
            return DeadlineExceeded(
                f"{what}: slow, stopped, or running another program", self._place(pending)
            )
        return (
            self._lost_peer(pending.counts, pending.tag, pending.group.hop)
            if age_s > READ_NOTICES_S
            else None
        )

    def _lost_peer(self, counts: Mapping[int, int], tag: Tag, hop: int) -> PeerLost | None:
        """Return the error for a peer that left without its part in what `counts` count: NCCL does
        not report it.
        """
        if (peer := self._notices.left_early(counts)) is None:
            return None
        what = "the peer left before this transfer: look at its own error"
        return PeerLost(what, tag.place(self.rank, hop, peer))

    def _fail(self, error: TransportError) -> bool:
        """Abort because of `error`;
        return False if the transport had failed or been closed before.
        """
        with self._failing:
            if self._failure is not None or self._closed:
                return False
            self._failure = error
        self._give_up()
        return True

    def _give_up(self) -> None:
        if self._may_free():
            self._notices.announce(None)
            _abort(self._in_use, self._graphs, self._communicator)

    def _may_free(self) -> bool:
        """Stop the watchdog; return True for the first caller only, since a communicator is freed
        once.
        """
        self._freeing.set()
        return self._abandon.detach() is not None

    def wait(self) -> None:
        for pending in tuple(self._pending):
            self._wait_for(pending)
        if self._failure is not None and not self._raised:
            raise self._raising(self._failure)

    def _wait_for(self, pending: Pending) -> None:
        """Wait until `pending` is complete: the watchdog ends it, unless the stream waits for
        something else.
        """
        end_s = pending.begin_s + pending.timeout_s + 2 * FREE_S
        try:
            while not pending.is_over:
                if clock.now_s() > end_s:
                    raise DeadlineExceeded(HELD_UP, self._place(pending))
                sleep(POLL_S)
        except RuntimeError as error:
            what = f"the GPU failed ({error}): look at the output of all ranks"
            self._fail(TransportError(what, self._place(pending)))

    def close(self) -> None:
        """Wait until all queued groups are complete, then free the communicator, even after an
        error.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            if self._may_free():
                # a rank that waits for this one would not free its own
                self._notices.announce(self._counts)
                # a rank of this host does not come: a thread waits on
                with self._in_use, suppress(TimeoutError):
                    _free(self._graphs)
                    start_call(self._communicator.destroy).result(FREE_S)

    def abort(self) -> None:
        """End what is queued and free the communicator; callable from any thread."""
        self._closed = True
        self._give_up()

    def leave_to_parent(self) -> None:
        """Never free the communicator in a forked child: that would end the parent's.

        Takes no lock, as a thread that is not here may have held it, such as the watchdog that of
        its event.
        """
        self._closed = True
        if self._abandon.detach() is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))


def _abandon(
    freeing: threading.Event, in_use: threading.Lock, graphs: Graphs, communicator: Communicator
) -> Future[None] | None:
    """Abort the communicator of a transport that was collected, before CuPy frees it and waits for
    other ranks.

    Whoever happens to collect may hold what an abort waits for, so a thread of its own aborts. At
    the end of the interpreter nobody holds anything, and no thread can be started (Python 3.12).
    """
    freeing.set()
    if threading.main_thread().is_alive():
        return start_call(lambda: _abort(in_use, graphs, communicator))
    _free(graphs)
    communicator.abort()
    return None


def _free(graphs: Graphs) -> None:
    for graph in tuple(graphs):
        graph.reset()


def _abort(in_use: threading.Lock, graphs: Graphs, communicator: Communicator) -> None:
    """Abort `communicator`.

    Nobody uses it meanwhile, except for a call that waits inside and is ended by this.
    """
    idle = in_use.acquire(timeout=BUSY_S)
    freed = start_call(communicator.abort)
    if not idle:
        idle = in_use.acquire(timeout=FREE_S)
    if idle:
        _free(graphs)
    with suppress(TimeoutError):
        freed.result(FREE_S)
    if idle:
        in_use.release()
