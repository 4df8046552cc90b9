# SPDX-License-Identifier: Apache-2.0
"""Peers' memory: buffers of the GPUs of one host, which all its ranks map and read where they lie.

A transport of windows beside another one, which carries all other groups. In a window a hop is a meeting and kernels
that read (`commrt.runtime.reading`). In a meeting a rank tells its peers how far it has come, by a word in their
memory, and waits for theirs, on the device. The counters lie on the device too, so a graph repeats what calls do. A
meeting has a deadline. One that fails takes back what the rank told, so that no peer reads what later kernels
overwrite; after it, no kernel tells anything any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import sleep
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError, UsageError
from commrt.kernels.meeting import ABORT, ENDED, FAILED, HOST_WORDS, PLACES, TIMEOUT_NS, MeetingPlan
from commrt.program import Meeting
from commrt.store.client import clone_connection, start_call
from commrt.store.launcher import chosen_transport
from commrt.store.rendezvous import host_identity
from commrt.threads.clock import now_s
from commrt.threads.comm_thread import release_in_forked_child
from commrt.threads.streams import StreamEvent, streams_of
from commrt.transport.nccl import NcclTransport
from commrt.transport.nccl_communicator import Graphs, ShutdownNotices, Watchdog
from commrt.transport.neighbours import Neighbours, PeerMemory
from commrt.transport.protocol import Exchange, P2PGroup, QueueingTransport, Tag, Window

__all__ = ["PeersTransport", "beside", "connect"]

_log = logging.getLogger("commrt")
LINGER_S = 1.0
"""Time for the peers to unmap the memory of this rank before it is freed."""
SLACK_S = 20.0
"""What the device may need besides the deadline of a meeting."""
POLL_S = 0.0002
HELD_UP = "the stream is held up by something else: is another library's collective waiting on this GPU"
READ_NOTICES_S = 0.1
"""Time without progress after which the store is read for ranks that have left."""
CAPTURE = Tag(-1, "graph")
"""In errors, for a meeting that has not run yet."""


@dataclass(slots=True, eq=False)
class _Bound:
    """A bound meeting."""

    hop: int
    ranks: Sequence[int]
    begins: bool
    """True if a program begins with it."""
    tag: Tag = CAPTURE
    """Of its latest run."""


WHY_NOT = "slow, stopped, waiting for another rank, or running another program"


class PeersTransport:
    """One rank of a host whose ranks are `neighbours`; moves all other groups by `rest`, of the same members.

    The error of a meeting is raised by the next exchange, by `wait` or by `close`; before, `on_failure` is called. All
    exchanges come from one thread at a time, on one stream.
    """

    can_move_receives = False
    one_host = False

    def __init__(
        self,
        rest: QueueingTransport,
        neighbours: Neighbours,
        notices: ShutdownNotices,
        memory: PeerMemory,
        device: torch.device,
        on_failure: Callable[[TransportError], None] | None = None,
    ) -> None:
        self._rest, self._neighbours, self._notices = rest, neighbours, notices
        self._memory, self.device = memory, device
        self.rank, self.members = rest.rank, rest.members
        self._streams, self._on_failure = streams_of(device), on_failure
        self._numbers = count()
        self._meetings: dict[int, _Bound] = {}  # by number, as long as it is bound
        self._captured: list[_Bound] | None = None  # meetings of the graph that is being captured
        self._graphs = Graphs()
        self._host = memory.host_words(len(HOST_WORDS))
        self._words = self._host.numpy()
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._begun = dict.fromkeys(neighbours.ranks, 0)
        """Programs begun with each peer."""
        self._queued = 0  # programs
        self._latest = CAPTURE
        self._stalled: tuple[int, float] = 0, 0.0  # how many had ended, and since when no other has
        self._counts = {peer: torch.zeros(1, dtype=torch.int32, device=device) for peer in neighbours.ranks}
        self._failure: TransportError | None = None
        self._noting = threading.Lock()  # the watchdog looks too
        self._raised = self._closed = self._is_unmapped = False
        self.timeout_s = rest.timeout_s
        self.before_abort: Callable[[], None] = lambda: None
        rest.before_abort = self._give_up_meetings
        self._watchdog = Watchdog(self._check, self._streams.use)
        release_in_forked_child(self)

    @property
    def kind(self) -> str:
        """See `Transport.kind`."""
        return f"peers' memory and {self._rest.kind}"

    @property
    def timeout_s(self) -> float:
        """See `Transport.timeout_s`: of a meeting too."""
        return self._rest.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._rest.timeout_s = seconds
        self._words[TIMEOUT_NS] = int(min(seconds, 1e9) * 1e9)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """See `Transport.allocate`: by the rest."""
        return self._rest.allocate(numel, dtype, self.device if device is None else device)

    def allocate_shared(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """See `Transport.allocate_shared`: an allocation of its own; waits for the device."""
        if device not in (None, self.device):
            return self._rest.allocate(numel, dtype, device)
        return self._neighbours.allocate(numel, dtype)

    def share(self, buffers: Sequence[Tensor]) -> Sequence[Window]:
        """Return windows of `buffers`, all from `allocate_shared`. Collective, with the same sizes on all members."""
        return [Window(peers, self.bind_meeting) for peers in self._neighbours.share(buffers, self.timeout_s)]

    def bind(self, group: P2PGroup) -> Exchange:
        """See `Transport.bind`: by the rest."""
        return self._rest.bind(group)

    def bind_meeting(
        self,
        meeting: Meeting,
        hop: int,
        ranks: Sequence[int],
        *,
        first: bool = False,
        last: bool = False,
        looks: bool = False,
    ) -> Exchange:
        """Prepare `meeting` with `ranks` once, to run it many times; `hop` is for errors.

        A program begins with its `first` meeting and ends with its `last` one, after which positions begin anew.
        One that `looks` fails if an exchange before it, by other means, has been given up.
        """
        self._require_open(CAPTURE, hop)
        number, words = next(self._numbers), [self._neighbours.words(peer) for peer in ranks]
        bound = self._meetings[number] = _Bound(hop, ranks, first)
        plan = MeetingPlan(
            [word.outbox for word in words],
            [word.inbox for word in words],
            [self._counts[peer] for peer in ranks],
            ranks,
            [meeting.needs.get(peer, 0) for peer in ranks],
            self._state,
            self._host,
            meeting.position,
            meeting.position if last else 0,
            number,
            looks,
        )
        launch = self._memory.meet(plan)

        def meet(tag: Tag) -> None:
            self._require_open(tag, hop)
            if self._captured is None:
                self._note(bound, tag)
            else:
                self._captured.append(bound)
            launch()

        finalize(meet, self._meetings.pop, number)
        return meet

    def capture(self, work: Callable[[], None], group: P2PGroup) -> Exchange | None:
        """See `Transport.capture`: one CUDA graph, by the rest unless all messages of `group` are read."""
        captured = self._captured = list[_Bound]()
        try:
            launch = self._capture_alone(work) if group.reads else self._rest.capture(work, group)
        finally:
            self._captured = None
        return None if launch is None else self._replay_of(launch, captured)

    def _capture_alone(self, work: Callable[[], None]) -> Exchange | None:
        graph = self._streams.capture(work)
        if graph is None:
            return None

        def launch(tag: Tag, _kept: object = work) -> None:  # noqa: ARG001  # `work` has the memory that the graph uses
            graph.replay()

        self._graphs.keep(graph, launch)
        return launch

    def _replay_of(self, launch: Exchange, captured: Sequence[_Bound]) -> Exchange:
        def replay(tag: Tag) -> None:
            self._require_open(tag, 0)
            for bound in captured:
                self._note(bound, tag)
            launch(tag)

        return replay

    def _note(self, bound: _Bound, tag: Tag) -> None:
        bound.tag = self._latest = tag
        if bound.begins:
            self._queued += 1
            for peer in bound.ranks:
                self._begun[peer] += 1

    def _require_open(self, tag: Tag, hop: int) -> None:
        if self._words[FAILED]:
            self._check()
        if self._failure is not None:
            self._raised = True
            raise self._failure
        if self._closed:
            raise TransportClosed("the transport was closed", tag.place(self.rank, hop))

    def _check(self) -> None:
        """Note what has failed, if something has; called by the watchdog too."""
        with self._noting:
            if self._failure is not None or self._closed:
                return
            failure = self._failure = self._failed_meeting() or self._lost_peer()
        if failure is not None:
            self._give_up_meetings()
            self._notices.announce(None)
            if self._on_failure is not None:
                self._on_failure(failure)

    def _failed_meeting(self) -> TransportError | None:
        """Return the error of the meeting that has failed, or None."""
        if not (word := int(self._words[FAILED])):
            return None
        number, peer = divmod(word - 1, PLACES)
        bound = self._meetings.get(number, _Bound(0, (), begins=False, tag=self._latest))
        what = f"rank {peer} did not come within {self.timeout_s:g} s, or gave up: {WHY_NOT}"
        return DeadlineExceeded(what, bound.tag.place(self.rank, bound.hop, peer))

    def _lost_peer(self) -> TransportError | None:
        """Return the error for a peer that left without its part in what is queued; looked up if nothing moves."""
        ended, since_s = self._stalled
        if ended != self._words[ENDED] or ended == self._queued:
            self._stalled = int(self._words[ENDED]), now_s()
        elif now_s() - since_s > READ_NOTICES_S and (peer := self._notices.left_early(self._begun)) is not None:
            what = "the peer left before this exchange: look at its own error"
            return PeerLost(what, self._latest.place(self.rank, 0, peer))
        return None

    def wait(self) -> None:
        """Wait until all that is queued is complete; raises an error that no call has raised yet."""
        end, deadline_s = self._streams.record_event(), now_s() + self.timeout_s + SLACK_S
        while not self._is_reached(end):
            if now_s() > deadline_s:
                raise DeadlineExceeded(HELD_UP, Place(self.rank))
            sleep(POLL_S)
        self._check()
        if self._failure is not None and not self._raised:
            self._raised = True
            raise self._failure
        self._rest.wait()

    def _is_reached(self, end: StreamEvent) -> bool:
        try:
            return end.query()
        except RuntimeError as error:
            what = f"the GPU failed ({error}): look at the output of all ranks"
            raise TransportError(what, self._latest.place(self.rank, 0)) from error

    def close(self) -> None:
        """Wait until the device has done all work, then unmap the memory of peers, even after an error."""
        if self._is_unmapped:
            return
        was_open, self._is_unmapped = not self._closed, True
        try:
            self._end(was_open)
        finally:
            self._closed = True
            self._watchdog.stop()
            self._rest.close()
        if was_open and self._failure is not None and not self._raised:
            raise self._failure

    def _end(self, was_open: bool) -> None:
        try:
            start_call(self._memory.synchronize).result(self.timeout_s + SLACK_S)
        except TimeoutError as error:  # kernels may still read what is mapped
            self._notices.announce(None)
            raise DeadlineExceeded(HELD_UP, Place(self.rank)) from error
        self._check()
        self._closed = True
        self._graphs.drop_all()
        ends_well = was_open and self._failure is None
        if ends_well:
            self._notices.announce(self._begun)
        self._neighbours.close(LINGER_S if ends_well else 0.0)

    def _give_up_meetings(self) -> None:
        """Let no meeting tell that what the rest was to bring is ready."""
        self._words[ABORT] = 1

    def abort(self) -> None:
        """End the meetings that wait, from any thread; memory stays mapped until `close`."""
        self._give_up_meetings()
        was_open, self._closed = not self._closed, True
        self._watchdog.stop()
        if was_open and self._failure is None:
            self._notices.announce(None)
        self._rest.abort()

    def leave_to_parent(self) -> None:
        """Do nothing with the device in a forked child: the parent uses it."""
        self._closed = self._is_unmapped = True
        self._watchdog.stop()


def connect(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout_s: float,
    device: torch.device,
    *,
    on_failure: Callable[[TransportError], None],
) -> QueueingTransport:
    """Connect a rank by NCCL, with windows in peers' memory where the ranks of its host can map it. Collective.

    Raises `UsageError` where they cannot and COMMRT_TRANSPORT asks for it.
    """
    rest = NcclTransport(PrefixStore("nccl", store), rank, members, timeout_s, device, on_failure=on_failure)
    try:
        host = host_identity() or f"none that rank {rank} can share"
        made = beside(rest, store, PeerMemory(device), device, host, on_failure)
    except BaseException:
        rest.abort()  # others may be connected already, and wait for this rank
        raise
    if isinstance(made, PeersTransport):
        return made
    if made and chosen_transport() == "peers":
        rest.abort()
        raise UsageError(f"COMMRT_TRANSPORT=peers, but GPUs cannot read each other's memory: {made}. Unset it")
    if made:
        _log.info("GPUs of this host exchange through NCCL, not through each other's memory: %s", made)
    return rest


def beside(
    rest: QueueingTransport,
    store: Store,
    memory: PeerMemory,
    device: torch.device,
    host: str,
    on_failure: Callable[[TransportError], None] | None = None,
) -> PeersTransport | str:
    """Return windows beside `rest`, or why there are none; no reason for a rank that is alone on `host`. Collective."""
    own = PrefixStore("peers", clone_connection(store))
    neighbours = Neighbours(own, rest.rank, rest.members, rest.timeout_s, memory, host)
    if not neighbours.ranks:
        return neighbours.refusal
    return PeersTransport(rest, neighbours, ShutdownNotices(own, rest.rank), memory, device, on_failure)
