# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``cupy.cuda.nccl``: its sends and receives, on host memory, between threads of one process.

It keeps NCCL's rules, and is stricter only where NCCL leaves the result undefined:

* calls between a thread's first ``groupStart`` and last ``groupEnd`` are posted together, and end together; a call
  outside is a group of its own, so two ranks that both send first wait for ever;
* the k-th send from one rank to another matches the k-th receive there; there are no tags;
* one group of a rank matches one group of its peer, with as many sends as that one has receives, of the same counts.
  NCCL calls anything else undefined; here both ends get ``NCCL_ERROR_INTERNAL_ERROR``;
* a rank's send to itself needs its receive in the same group;
* after a refused call nothing of its group is posted, and ``groupEnd`` raises the error again; a constructor that fails
  leaves a group open in its thread (seen with NCCL 2.28.9);
* only one thread at a time uses a communicator; here a second one gets ``NCCL_ERROR_INVALID_USAGE``;
* ``abort`` ends the calls that wait in its own communicator; peers are not told, and wait on;
* a group that a thread records (`record` stands for CUDA graphs) is posted by each replay. The k-th group that a rank
  recorded with a peer must meet the peer's k-th; NCCL leaves anything else undefined, here both ends get
  ``NCCL_ERROR_INTERNAL_ERROR``;
* ``abort`` and ``destroy`` return when all graphs with calls of the communicator are reset.

Bytes are given by raw addresses. There are no streams: a call returns when its work is done.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = [
    "NCCL_INT8", "NcclCommunicator", "NcclError", "available", "get_build_version", "get_unique_id",
    "get_version", "groupEnd", "groupStart",
]  # fmt: skip

available = True
NCCL_INT8 = 0
UNIQUE_ID_NBYTES = 128
VERSION = 22809

INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(3, 7)
STATUSES = dict(enumerate(("UNHANDLED_CUDA_ERROR", "SYSTEM_ERROR", "INTERNAL_ERROR", "INVALID_ARGUMENT",
                           "INVALID_USAGE", "REMOTE_ERROR"), start=1))  # fmt: skip
"""Names by status; ends at 6 as in CuPy, which has no name for 7 (in progress)."""


class NcclError(RuntimeError):
    """A status of NCCL other than success."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"NCCL_ERROR_{STATUSES[status]}")


class RecordedGraph:
    """Recorded calls, in order, with their arguments."""

    def __init__(self) -> None:
        self.replays = 0
        self.calls: list[Callable[[], None]] = []
        self.communicators: list[NcclCommunicator] = []

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()

    def reset(self) -> None:
        communicators, self.communicators, self.calls = self.communicators, [], []
        with changed:
            for communicator in communicators:
                communicator._graphs -= 1
            changed.notify_all()

    __del__ = reset


class _Thread(threading.local):
    """What a thread has begun."""

    graph: RecordedGraph | None = None
    """The graph that it records to."""
    depth = 0
    """Of its open groups."""
    status = 0
    """Status of the first call of them that was refused."""

    def __init__(self) -> None:
        self.calls: list[_Posted] = []


_thread = _Thread()


def recording() -> RecordedGraph | None:
    return _thread.graph


def ask(call: Callable[[], None]) -> None:
    """Call `call` now, or in each replay if the thread records."""
    if _thread.graph is None:
        call()
    else:
        _thread.graph.calls.append(call)


def record(work: Callable[[], None]) -> RecordedGraph:
    """Return a graph of the device calls of `work`, which are not run yet; its other code runs now, and only now."""
    graph = _thread.graph = RecordedGraph()
    try:
        work()
    except BaseException:
        graph.reset()
        raise
    finally:
        _thread.graph = None
    return graph


@dataclass(slots=True, eq=False)
class _Posted:
    """A send or a receive of a group."""

    communicator: NcclCommunicator
    is_send: bool
    address: int
    count: int
    peer: int


@dataclass(slots=True, eq=False)
class _Post:
    """All calls of one rank with one peer in one group, in order."""

    calls: list[_Posted]
    number: int = 0
    """Counts the groups that were recorded with this peer, from 1 on; 0 for a group that was not recorded."""
    done: bool = False
    status: int = 0


@dataclass(slots=True, eq=False)
class _Fabric:
    """Connects the ranks of one unique id."""

    ranks: int
    arrived: set[int] = field(default_factory=set)
    posted: dict[tuple[int, int], _Post] = field(default_factory=dict)
    """(rank, peer) -> the post with which rank waits for peer; at most one, since calls return when it is done."""


changed = threading.Condition()
_fabrics: dict[bytes, _Fabric] = {}


def get_version() -> int:
    """Return the version of the library, as 10,000 * major + 100 * minor + patch."""
    return VERSION


get_build_version = get_version


def get_unique_id() -> bytes:
    """Return the id of a new communicator, to be made by one rank and given to the others."""
    return secrets.token_bytes(UNIQUE_ID_NBYTES)


def groupStart() -> None:  # noqa: N802  # as in CuPy
    """Collect the calls of this thread until the matching `groupEnd`; groups nest."""
    _thread.depth += 1


def groupEnd() -> None:  # noqa: N802  # as in CuPy
    """Post the collected calls if this ends the outermost group, and wait until all are done."""
    if _thread.depth == 0:
        raise NcclError(INVALID_USAGE)
    _thread.depth -= 1
    if _thread.depth == 0:
        calls, _thread.calls = _thread.calls, []
        status, _thread.status = _thread.status, 0
        if status:
            raise NcclError(status)
        _run(calls)


def _refused(status: int) -> NcclError:
    """Return the error of a call, which an open group remembers."""
    _thread.status = _thread.depth and (_thread.status or status)
    return NcclError(status)


class NcclCommunicator:
    """One rank of a communicator; the constructor returns when all ranks have joined."""

    comm = 1
    """0 once it was aborted."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
        self._rank, self._users = rank, 0
        self._recorded, self._graphs = [0] * ndev, 0
        with changed:
            self._fabric = _fabrics.setdefault(commId, _Fabric(ndev))
            if self._fabric.ranks != ndev or rank in self._fabric.arrived:
                _thread.depth += 1
                raise NcclError(INVALID_USAGE)
            self._fabric.arrived.add(rank)
            changed.notify_all()
            changed.wait_for(lambda: len(self._fabric.arrived) == ndev)

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._issue(_Posted(self, True, address, count, peer), datatype)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._issue(_Posted(self, False, address, count, peer), datatype)

    def _issue(self, call: _Posted, datatype: int) -> None:
        self._require_open()
        if not 0 <= call.peer < self._fabric.ranks or datatype != NCCL_INT8:
            raise _refused(INVALID_ARGUMENT)
        if _thread.depth:
            _thread.calls.append(call)
        else:
            _run([call])

    def _require_open(self) -> None:
        if not self.comm:
            raise _refused(INVALID_ARGUMENT)

    def check_async_error(self) -> None:
        """Raise nothing: NCCL does not report a lost peer of the same host either."""
        self._require_open()

    def abort(self) -> None:
        """End the calls that wait in this communicator, from any thread; it cannot be used again."""
        with changed:
            self.comm = 0
            for peer in range(self._fabric.ranks):  # or it would read and write memory that is not ours any more
                self._fabric.posted.pop((self._rank, peer), None)
            changed.notify_all()
            changed.wait_for(lambda: not self._graphs)

    destroy = abort


def _run(calls: list[_Posted]) -> None:
    """Run a whole group now, or in each replay if the thread records."""
    if (graph := _thread.graph) is None:
        _run_group(calls, {})
    else:
        with changed, _exclusively({call.communicator for call in calls}):
            numbers = {end: _recorded(graph, *end) for end in _posts(calls)}
        graph.calls.append(lambda: _run_group(calls, numbers))


def _recorded(graph: RecordedGraph, communicator: NcclCommunicator, peer: int) -> int:
    """Count a group that is recorded with `peer`, and return its number."""
    communicator._graphs += 1
    graph.communicators.append(communicator)
    communicator._recorded[peer] += 1
    return communicator._recorded[peer]


def _run_group(calls: list[_Posted], numbers: dict[tuple[NcclCommunicator, int], int]) -> None:
    """Post a whole group and wait until it is done."""
    with changed, _exclusively({call.communicator for call in calls}):
        posts = _posts(calls)
        for end, post in posts.items():
            post.number = numbers.get(end, 0)
        for (communicator, peer), post in posts.items():
            _post(communicator._fabric, communicator._rank, peer, post)  # of this module
        while not all(post.done or not communicator.comm for (communicator, _), post in posts.items()):
            changed.wait()
        statuses = [post.status if post.done else REMOTE_ERROR for post in posts.values()]
    for status in filter(None, statuses):
        raise NcclError(status)


@contextmanager
def _exclusively(communicators: set[NcclCommunicator]) -> Iterator[None]:
    """Raise `NcclError` if another thread is inside one of `communicators`."""
    if any(communicator._users for communicator in communicators):  # of this module
        raise NcclError(INVALID_USAGE)
    for communicator in communicators:
        communicator._require_open()
        communicator._users += 1
    try:
        yield
    finally:
        for communicator in communicators:
            communicator._users -= 1


def _posts(calls: list[_Posted]) -> dict[tuple[NcclCommunicator, int], _Post]:
    """Return the calls of a group by communicator and peer."""
    posts: dict[tuple[NcclCommunicator, int], _Post] = {}
    for call in calls:
        posts.setdefault((call.communicator, call.peer), _Post([])).calls.append(call)
    return posts


def _post(fabric: _Fabric, rank: int, peer: int, post: _Post) -> None:
    """Match `post` with the post of `peer` if that is there, otherwise leave it to be matched; a self send at once."""
    if peer == rank:
        post.done, post.status = True, _transfer(post.calls, post.calls) and INVALID_USAGE
        return
    other = fabric.posted.get((peer, rank))
    if other is None or not (_fits(post, other) or _fits(other, post)):
        fabric.posted[rank, peer] = post
        return
    del fabric.posted[peer, rank]
    post.status = other.status = (
        INTERNAL_ERROR
        if post.number != other.number
        else _transfer(post.calls, other.calls) or _transfer(other.calls, post.calls)
    )
    post.done = other.done = True
    changed.notify_all()


def _fits(here: _Post, there: _Post) -> bool:
    """Return True if `here` sends and `there` receives: two ranks that only send never match."""
    return any(call.is_send for call in here.calls) and not all(call.is_send for call in there.calls)


def _transfer(here: list[_Posted], there: list[_Posted]) -> int:
    """Copy the sends of `here` to the receives of `there`, in order; return a status, not 0 if they do not fit."""
    sends = [call for call in here if call.is_send]
    recvs = [call for call in there if not call.is_send]
    if [call.count for call in sends] != [call.count for call in recvs]:
        return INTERNAL_ERROR
    for send, recv in zip(sends, recvs, strict=True):
        ctypes.memmove(recv.address, send.address, send.count)
    return 0
