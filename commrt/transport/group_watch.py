# SPDX-License-Identifier: Apache-2.0
"""The groups that a rank has queued on its GPU: their deadlines, and what their failure ends.

NCCL has no deadlines, and no rank learns from it that another has given up (NVIDIA/nccl#279). A
watchdog thread enforces the deadlines, reads from the store which ranks have left, and aborts the
communicator to end what waits in it; it alone asks for a `lost_peer`. All else is called by the
thread that exchanges, or later closes; `fail` and `abort` by any. `commrt.transport.peers` adds to
`counts`.

A transport and its communicator (`commrt.transport.nccl_communicator`) fail and end so::

    open --- fail(): late, lost peer, error ----> failed, communicator aborted
      |                                             |
      |      abort(), close(), leave_to_parent() ---+--> closed
      |
      |--- abort(): any thread -----------------> closed, communicator aborted
      |--- close(): waits for all groups -------> closed, communicator destroyed
      +--- leave_to_parent(): in a forked child > closed, communicator left to the parent

After a failure all calls raise it, closed or not. Otherwise a closed transport raises
`TransportClosed`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Protocol
from weakref import WeakMethod

import torch

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError
from commrt.threads.deadline import clock
from commrt.threads.forking import release_in_forked_child
from commrt.threads.streams import DONE, StreamEvent, Streams
from commrt.transport.nccl_communicator import FREE_S, Communicator
from commrt.transport.protocol import P2PGroup, Tag
from commrt.transport.shutdown_notices import ShutdownNotices

CHECK_INTERVAL_S = 0.05
READ_NOTICES_S = 0.1
"""Age of a pending group from which the store is read for ranks that have left."""
MAX_PENDING = 256
"""Exchanges, mostly of one group each; more fill NCCL's queues, and it hangs (NVIDIA/nccl#2353)."""
POLL_S = 0.0005
"""Seconds between two looks at a pending group that is waited for."""
HELD_UP = (
    "the stream is held up by something else: is another library's collective waiting on this GPU"
)
CAPTURE = Tag(-1, "graph")
"""The tag, in errors, of a group that is being captured."""


@dataclass(slots=True, eq=False)
class Pending:
    """A group that has begun and may not be complete.

    The thread that exchanges writes it, and the watchdog reads it.
    """

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

    def place(self, rank: int) -> Place:
        """Return the place of the first receive or send of `rank`: NCCL names no late peer."""
        for first in (*self.group.recvs, *self.group.sends):
            return self.tag.place(rank, self.group.hop, first.peer, first.data.nbytes)
        return self.tag.place(rank, self.group.hop)


class DeviceWaits(Protocol):
    """What waits for peers on the device beside NCCL's groups, with deadlines of its own."""

    def find_failure(self, watch: GroupWatch) -> TransportError | None:
        """Return why it cannot complete, if that is known; called by the watchdog only."""

    def abort(self) -> None:
        """Let all waits fail, before NCCL's groups are ended."""


class GroupWatch:
    """What all transports of one GPU share: `communicator`, what is queued, and the failure.

    Starts the watchdog, which calls `on_failure` with what it finds.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        streams: Streams,
        communicator: Communicator,
        notices: ShutdownNotices,
        on_failure: Callable[[TransportError], None] | None,
    ) -> None:
        self.timeout_s = timeout_s
        """Of what is queued from now on; set through the transports, on any thread."""
        self.streams = streams
        self.communicator = communicator
        self.counts = dict.fromkeys(members, 0)
        """How often this rank began to exchange with each peer.

        Written by the thread that exchanges, also by others: `PeersTransport`, for its windows.
        """
        self.failure: TransportError | None = None
        """Set once, by `fail` on any thread."""
        self.is_closed = False
        """Set once, by `abort` on any thread, by `close`, or in a forked child."""
        self.is_capturing = False
        """True during `capture`, in which the same thread binds and runs."""
        self._waits: DeviceWaits | None = None
        self._notices = notices
        self._rank = rank
        self._on_failure = on_failure
        self._pending: deque[Pending] = deque()
        self._failing = threading.Lock()
        self._is_raised = False  # whether a caller has got the failure
        threading.Thread(
            target=_watch,
            args=(WeakMethod(self._check), streams, communicator.ended),
            name="commrt-watchdog",
            daemon=True,
        ).start()
        release_in_forked_child(self)

    def watch_too(self, waits: DeviceWaits) -> None:
        """Let the watchdog look after `waits` too; call it once, before anything is queued."""
        self._waits = waits

    def queue(self, issue: Callable[[], None], group: P2PGroup, tag: Tag) -> None:
        """Call `issue`, which queues `group`, and let the watchdog enforce the deadline."""
        peers = group.peers
        for peer in peers:
            self.counts[peer] += 1
        pending = Pending(
            group, tag, clock.now_s(), self.timeout_s, {peer: self.counts[peer] for peer in peers}
        )
        self._pending.append(pending)
        try:
            with suppress(IndexError):  # fewer are pending
                self.wait_for(self._pending[-1 - MAX_PENDING])
            with self.communicator.in_use:
                self.require_open(group.hop, tag)  # the watchdog may have aborted it
                issue()
            pending.end = self.streams.record_event()
        # KeyError: CuPy has no name for NCCL's statuses above 6
        except (RuntimeError, KeyError) as error:
            raise self._fail_by(error, pending) from error
        finally:
            pending.end = pending.end or DONE

    def capture(self, work: Callable[[], None], group: P2PGroup) -> torch.cuda.CUDAGraph | None:
        """Record one CUDA graph, watched as one group with all peers; None where none is made."""
        pending = Pending(group, CAPTURE, clock.now_s(), self.timeout_s, {})
        self._pending.append(pending)  # NCCL may wait for the peers during the capture
        self.is_capturing = True
        try:
            with self.communicator.in_use:
                self.require_open(group.hop)
                graph = self.streams.capture(work)
                if graph is not None:
                    self.communicator.graphs.add(graph)
        except (RuntimeError, KeyError) as error:
            if self.failure is not None or self.is_closed:
                raise self._fail_by(error, pending) from error
            raise RuntimeError(str(error)) from error
        finally:
            self.is_capturing = False
            pending.end = DONE
        return graph

    def require_open(self, hop: int, tag: Tag | None = None) -> None:
        """Raise the failure, or `TransportClosed`; `hop` and `tag` are of what the caller does."""
        if self.failure is not None:
            raise self._raising(self.failure)
        if self.is_closed:
            place = tag.place(self._rank, hop) if tag else Place(self._rank, hop=hop)
            raise TransportClosed("the transport was closed", place)

    def _fail_by(self, error: Exception, pending: Pending) -> TransportError:
        """Fail because of an error of NCCL, which only says that `pending` has ended.

        Returns what to raise: that, or else why this watch had failed or been closed before.
        """
        place = pending.place(self._rank)
        what = (
            f"NCCL refused the transfers ({error}): run with NCCL_DEBUG=WARN; the ranks may run"
            " different programs"
        )
        self.fail(TransportError(what, place))
        if self.failure is not None:
            return self._raising(self.failure)
        return TransportClosed("this rank gave the transport up during the transfer", place)

    def _raising(self, failure: TransportError) -> TransportError:
        """Return `failure` for a caller, and note that one has got it."""
        self._is_raised = True
        return failure

    def _check(self) -> None:
        """Abort the communicator if something has failed or is late; called by the watchdog."""
        try:
            while self._pending and self._pending[0].is_over:
                self._pending.popleft()
            failure = self._find_failure()
        except (RuntimeError, KeyError) as error:
            what = f"the GPU or NCCL failed ({error}): look at the output of all ranks"
            place = self._pending[0].place(self._rank) if self._pending else Place(self._rank)
            failure = TransportError(what, place)
        if failure is not None and self.fail(failure) and self._on_failure is not None:
            self._on_failure(failure)

    def _find_failure(self) -> TransportError | None:
        """Return why what is queued cannot complete, if that is known; raises NCCL's own errors."""
        if self._waits is not None:
            failure = self._waits.find_failure(self)
            if failure is not None:
                return failure
        # a call in progress reports its own errors
        if self.communicator.in_use.acquire(blocking=False):
            try:
                if self.failure is None and not self.is_closed:
                    self.communicator.nccl.check_async_error()
            finally:
                self.communicator.in_use.release()
        if not self._pending:
            return None
        pending = self._pending[0]
        age_s = clock.now_s() - pending.begin_s
        if age_s > pending.timeout_s:
            what = (
                f"timed out: no transfer with ranks {sorted(pending.group.peers)} within"
                f" {pending.timeout_s:g} s: slow, stopped, or running another program"
            )
            return DeadlineExceeded(what, pending.place(self._rank))
        if age_s > READ_NOTICES_S:
            return self.lost_peer(pending.counts, pending.tag, pending.group.hop)
        return None

    def lost_peer(self, counts: Mapping[int, int], tag: Tag, hop: int) -> PeerLost | None:
        """Return the error for a peer that left before its part of `counts`: NCCL reports none."""
        peer = self._notices.find_early_leaver(counts)
        if peer is None:
            return None
        what = "the peer left before this transfer: look at its own error"
        return PeerLost(what, tag.place(self._rank, hop, peer))

    def wait(self) -> None:
        """Wait until all groups are complete; raises a failure that no call has raised yet."""
        for pending in tuple(self._pending):
            self.wait_for(pending)
        if self.failure is not None and not self._is_raised:
            raise self._raising(self.failure)

    def wait_for(self, pending: Pending) -> None:
        """Wait until `pending` is over, which the watchdog ends unless the stream is held up."""
        end_s = pending.begin_s + pending.timeout_s + 2 * FREE_S
        try:
            while not pending.is_over:
                if clock.now_s() > end_s:
                    raise DeadlineExceeded(HELD_UP, pending.place(self._rank))
                sleep(POLL_S)
        except RuntimeError as error:
            what = f"the GPU failed ({error}): look at the output of all ranks"
            self.fail(TransportError(what, pending.place(self._rank)))

    def fail(self, error: TransportError) -> bool:
        """End all because of `error`; return False if it had failed or been closed before."""
        with self._failing:
            if self.failure is not None or self.is_closed:
                return False
            self.failure = error
        self._give_up()
        return True

    def abort(self) -> None:
        """End what is queued."""
        self.is_closed = True
        self._give_up()

    def _give_up(self) -> None:
        if self._waits is not None:
            self._waits.abort()
        if self.communicator.begin_to_end():
            self._notices.announce(None)
            self.communicator.abort()

    def close(self) -> None:
        """Wait until all groups are complete, then end, even after an error."""
        if self.is_closed:
            return
        try:
            self.wait()
        finally:
            self.is_closed = True
            if self.communicator.begin_to_end():
                # a rank that waits for this one would not free its own
                self._notices.announce(self.counts)
                self.communicator.destroy()

    def leave_to_parent(self) -> None:
        """Close without a call of NCCL or a lock, in a forked child."""
        self.is_closed = True
        self.communicator.leave_to_parent()


def _watch(
    method: WeakMethod[Callable[[], None]], streams: Streams, ended: threading.Event
) -> None:
    """Call `method` every `CHECK_INTERVAL_S` until its object is collected or `ended` is set."""
    streams.use()
    while not ended.wait(CHECK_INTERVAL_S):
        check = method()
        if check is None:
            return
        check()
        del check  # or its object would live until the next check
