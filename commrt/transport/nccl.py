# SPDX-License-Identifier: Apache-2.0
"""GPUs through raw NCCL sends and receives: the GPU transport.

An exchange is one NCCL group on the calling thread's current stream. It returns when the group is queued; what is
queued behind it on that stream sees what arrived. Bytes travel as NCCL_INT8, so every dtype does.

NCCL has no deadlines, and a rank learns from nobody that another has given up (NVIDIA/nccl#279). A watchdog thread
keeps the deadlines, asks the store who has left, and aborts the communicator, which ends what waits in it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from commrt.errors import DeadlineExceeded, PeerLost, Place, TransportClosed, TransportError, UsageError
from commrt.membership.store_client import run_within, start_call
from commrt.threads.streams import DONE, Graph, Mark, streams_of
from commrt.transport.binding import Binding, Communicator, load
from commrt.transport.clique import join
from commrt.transport.departures import Departures
from commrt.transport.graphs import Graphs
from commrt.transport.protocol import Exchange, Group, Moment, Parcel, split_self, zeros
from commrt.transport.watchdog import Watchdog

__all__ = ["NcclTransport"]

LOOK_S = 0.1
"""How old an exchange is before the store is asked who has left."""
IN_FLIGHT = 256
"""Exchanges; with too many NCCL's own queues were seen to fill up, and its threads to wait for each other (#2353)."""
WAIT_S = 0.0005
"""Between two looks of who waits."""
FREE_S = 10.0
"""How long freeing the communicator may take: other ranks of this host must come, and what is queued must end."""
BUSY_S = 0.2
"""How long the communicator may be in use before it is aborted all the same: a first exchange may wait inside."""

CAPTURE = Moment(-1, "graph")
"""In errors, what is not carried yet."""


class _Call(NamedTuple):
    """One NCCL call of a group, but for the stream."""

    issue: Callable[[int, int, int, int, int], None]
    address: int
    nbytes: int
    place: int
    """Of the peer among the members, which is what NCCL calls its rank."""


@dataclass(slots=True, eq=False)
class _Flight:
    """An exchange that has begun and may not have ended."""

    group: Group
    moment: Moment
    begin_s: float
    timeout_s: float
    numbers: dict[int, int]
    """Which of the exchanges with each peer this is."""
    end: Mark | None = None
    """On the stream; None while calls are being issued."""

    @property
    def is_over(self) -> bool:
        """Raises `RuntimeError` if the GPU has failed."""
        return self.end is not None and self.end.query()


class NcclTransport:
    """One rank of a clique of GPUs; a `Transport` for tensors on `device`, which is the thread's current one.

    Meets the other `members` on `store`, which only this communicator may have used, and raises `DeadlineExceeded` with
    those that do not come, `UsageError` for an NCCL that cannot be used or a GPU that two ranks chose.

    Errors of an exchange are raised by it, or if it had returned already, by the next one or by `close`. All exchanges
    come from one thread at a time; other communicators of the same GPU, such as ``torch.distributed``'s, need the same
    order of calls on every rank (NVIDIA/nccl#1766).
    """

    kind = "nccl"

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
        self.rank, self.members, self.timeout_s = rank, members, timeout_s
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._nccl = load() if binding is None else binding
        self._streams = streams_of(self.device)
        self._departures = Departures(store, rank)
        self._on_failure = on_failure
        self._flights: deque[_Flight] = deque()
        self._exchanges = dict.fromkeys(self.members, 0)
        """With each peer, begun so far."""
        self._in_use = threading.Lock()
        """Held while the communicator is called: freed meanwhile, it would be used after."""
        self._failure: TransportError | None = None
        self._closed = False
        self._told = False
        self._capturing = False
        self._communicator = join(store, rank, self.members, timeout_s, self.device, self._streams, self._nccl)
        self._graphs = Graphs()
        self._watchdog = Watchdog(self._look, self._streams.use)
        self._abandon = weakref.finalize(self, _abandon, self._watchdog, self._in_use, self._graphs, self._communicator)
        _OPEN.add(self)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """See `Transport.allocate`: ordinary memory of the device."""
        device = self.device if device is None else device
        self._require_device(device)
        return zeros(numel, dtype, device)

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`; two sends and two receives cost the host 5 us, without NCCL's own and an event."""
        rest, copies = split_self(group, self.rank, self.members)
        for parcel in (*group.sends, *group.recvs):
            self._require_device(parcel.data.device)
        self._require_open(group)
        calls = [self._call(self._communicator.send, parcel) for parcel in rest.sends]
        calls += [self._call(self._communicator.recv, parcel) for parcel in rest.recvs]

        def exchange(moment: Moment) -> None:
            self._require_open(rest, moment)
            for source, target in copies:
                target.copy_(source)
            if calls:
                self._run(calls, rest, moment)

        return exchange

    def _call(self, issue: Callable[[int, int, int, int, int], None], parcel: Parcel) -> _Call:
        return _Call(issue, parcel.data.data_ptr(), parcel.data.nbytes, self.members.index(parcel.peer))

    def _run(self, calls: Sequence[_Call], group: Group, moment: Moment) -> None:
        if self._capturing:
            self._issue(calls)
        else:
            self._watched(lambda: self._issue(calls), group, moment)

    def _watched(self, queue: Callable[[], None], group: Group, moment: Moment) -> None:
        flight = self._begun(group, moment, self._numbered(group))
        try:
            self._await_room()
            with self._in_use:
                self._require_open(group, moment)  # it may have been given up since
                queue()
            flight.end = self._streams.mark()
        except (RuntimeError, KeyError) as error:  # CuPy has no word for NCCL's statuses above 6
            raise self._explained(error, flight) from error
        finally:
            flight.end = flight.end or DONE

    def _await_room(self) -> None:
        with suppress(IndexError):
            self._wait_for(self._flights[-1 - IN_FLIGHT])

    def _begun(self, group: Group, moment: Moment, numbers: dict[int, int]) -> _Flight:
        flight = _Flight(group, moment, monotonic(), self.timeout_s, numbers)
        self._flights.append(flight)
        return flight

    def _numbered(self, group: Group) -> dict[int, int]:
        for peer in (peers := _peers(group)):
            self._exchanges[peer] += 1
        return {peer: self._exchanges[peer] for peer in peers}

    def capture(self, work: Callable[[], None], group: Group) -> Exchange | None:
        """See `Transport.capture`: one CUDA graph, whose end is watched as that of one exchange with all peers."""
        flight = self._begun(group, CAPTURE, {})  # NCCL may wait for the others here
        self._capturing = True
        try:
            with self._in_use:
                self._require_open(group)
                graph = self._streams.capture(work)
        except (RuntimeError, KeyError) as error:
            if self._failure is not None or self._closed:
                raise self._explained(error, flight) from error
            raise RuntimeError(str(error)) from error
        finally:
            self._capturing, flight.end = False, DONE
        return None if graph is None else self._replaying(graph, group)

    def _replaying(self, graph: Graph, group: Group) -> Exchange:
        def exchange(moment: Moment) -> None:
            self._require_open(group, moment)
            self._watched(graph.replay, group, moment)

        self._graphs.keep(graph, exchange)
        return exchange

    def _issue(self, calls: Sequence[_Call]) -> None:
        stream = self._streams.current()
        self._nccl.groupStart()
        try:
            for issue, address, nbytes, place in calls:
                issue(address, nbytes, self._nccl.NCCL_INT8, place, stream)
        finally:
            self._nccl.groupEnd()  # or all later calls of this thread would only be gathered

    def _explained(self, error: Exception, flight: _Flight) -> TransportError:
        """What ended the group, of which NCCL only says that it ended."""
        if self._failure is not None:
            return self._told_failure(self._failure)
        place = self._place(flight)
        if self._closed:
            return TransportClosed("this rank gave the transport up during the transfer", place)
        what = f"NCCL refused the transfers ({error}): run with NCCL_DEBUG=WARN; the ranks may run different programs"
        self._fail(TransportError(what, place))
        return self._told_failure(self._failure or TransportError(what, place))

    def _told_failure(self, failure: TransportError) -> TransportError:
        self._told = True
        return failure

    def _place(self, flight: _Flight) -> Place:
        """Names one peer, first of those from whom something was to come; NCCL does not say who is late."""
        first = (*flight.group.recvs, *flight.group.sends)[0]
        return Place(self.rank, first.peer, *flight.moment, flight.group.hop, first.data.nbytes)

    def _require_open(self, group: Group, moment: Moment | None = None) -> None:
        if self._failure is not None:
            raise self._told_failure(self._failure)
        if self._closed:
            where = Place(self.rank, None, *moment, group.hop) if moment else Place(self.rank, hop=group.hop)
            raise TransportClosed("the transport was closed", where)

    def _require_device(self, device: torch.device) -> None:
        if device != self.device:
            raise UsageError(
                f"this communicator moves tensors on {self.device}, not those on {device}: move them there"
            )

    def _look(self) -> None:
        """By the watchdog: end what takes too long."""
        if self._closed or self._failure is not None:
            return
        try:
            while self._flights and self._flights[0].is_over:
                self._flights.popleft()
            complaint = self._complaint()
        except (RuntimeError, KeyError) as error:
            complaint = TransportError(
                f"the GPU or NCCL failed ({error}): look at the output of all ranks", self._oldest()
            )
        if complaint is not None and self._fail(complaint) and self._on_failure is not None:
            self._on_failure(complaint)

    def _oldest(self) -> Place:
        return self._place(self._flights[0]) if self._flights else Place(self.rank)

    def _complaint(self) -> TransportError | None:
        """What is wrong; raises what NCCL says."""
        if self._in_use.acquire(blocking=False):  # or it is being used, and says so itself
            try:
                if self._failure is None and not self._closed:
                    self._communicator.check_async_error()
            finally:
                self._in_use.release()
        flight = self._flights[0] if self._flights else None
        if flight is None:
            return None
        age_s = monotonic() - flight.begin_s
        if age_s > flight.timeout_s:
            return self._late(flight)
        return self._left(flight) if age_s > LOOK_S else None

    def _late(self, flight: _Flight) -> DeadlineExceeded:
        peers = sorted(_peers(flight.group))
        what = (
            f"no transfer with ranks {peers} within {flight.timeout_s:g} s: slow, stopped, or running another program"
        )
        return DeadlineExceeded(what, self._place(flight))

    def _left(self, flight: _Flight) -> PeerLost | None:
        """If a peer left without its part in `flight`, which NCCL does not tell."""
        for peer, counts in self._departures.known(flight.numbers).items():
            if counts is None or counts.get(self.rank, 0) < flight.numbers[peer]:
                place = Place(self.rank, peer, *flight.moment, flight.group.hop)
                return PeerLost("the peer left before this transfer: look at its own error", place)
        return None

    def _fail(self, error: TransportError) -> bool:
        """Give up because of `error`; False if it was given up before."""
        if self._failure is not None or self._closed:
            return False
        self._failure = error
        self._give_up()
        return True

    def _give_up(self) -> None:
        if self._is_mine():
            self._departures.tell(None)
            _abort(self._in_use, self._graphs, self._communicator)

    def wait(self) -> None:
        """Wait until all that was queued has happened; raises what ended an exchange and nobody was told of."""
        try:
            for flight in tuple(self._flights):
                self._wait_for(flight)
        except RuntimeError as error:
            self._fail(TransportError(f"the GPU failed ({error}): look at the output of all ranks", self._oldest()))
        if self._failure is not None and not self._told:
            raise self._told_failure(self._failure)

    def _wait_for(self, flight: _Flight) -> None:
        """The watchdog keeps its deadline; what is left then is not the transport's."""
        end_s = flight.begin_s + flight.timeout_s + 2 * FREE_S
        while not flight.is_over:
            if monotonic() > end_s:
                what = "the stream is held up by something else: is another library's collective waiting on this GPU"
                raise DeadlineExceeded(what, self._place(flight))
            sleep(WAIT_S)

    def close(self) -> None:
        """`wait`, then free the communicator in any case."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            if self._is_mine():
                self._departures.tell(self._exchanges)  # who waits for this rank would not come to free its own
                with self._in_use, suppress(TimeoutError):  # a rank of this host does not come: a thread waits for it
                    self._graphs.drop_all()
                    run_within(FREE_S, self._communicator.destroy)

    def abort(self) -> None:
        """End what is queued, from any thread, and free the communicator."""
        self._closed = True
        self._give_up()

    def _is_mine(self) -> bool:
        """True for the first who asks: the communicator is freed once."""
        self._watchdog.stop()
        return self._abandon.detach() is not None

    def leave_to_parent(self) -> None:
        """In a forked child: the communicator is the parent's."""
        self._closed = True
        if self._is_mine():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))  # freeing it would end it


_OPEN: weakref.WeakSet[NcclTransport] = weakref.WeakSet()


def _abandon(watchdog: Watchdog, in_use: threading.Lock, graphs: Graphs, communicator: Communicator) -> None:
    """CuPy's own way to free a communicator that is collected waits for others."""
    watchdog.stop()
    _abort(in_use, graphs, communicator)


def _abort(in_use: threading.Lock, graphs: Graphs, communicator: Communicator) -> None:
    """Nobody else uses the communicator until it is freed, but for who waits inside and is ended by this."""
    idle = in_use.acquire(timeout=BUSY_S)
    freed = start_call(communicator.abort)
    if not idle:
        idle = in_use.acquire(timeout=FREE_S)
    if idle:
        graphs.drop_all()
    with suppress(TimeoutError):
        freed.result(FREE_S)
    if idle:
        in_use.release()


def _after_fork() -> None:
    for transport in tuple(_OPEN):
        transport.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _peers(group: Group) -> set[int]:
    return {parcel.peer for parcel in (*group.sends, *group.recvs)}
