# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `cupy.cuda.nccl`: its point-to-point calls, on host memory, between threads of one process.

It keeps NCCL's rules, and is stricter only where NCCL leaves open what happens:

* calls between ``groupStart`` and the last ``groupEnd`` of a thread are posted together, and end together; a call
  outside is a group of its own, so two ranks that both send first wait for ever;
* of an ordered pair the k-th send meets the k-th receive; there are no tags;
* a group of one rank must meet one group of its peer: as many sends as that one receives, of the same counts and types.
  NCCL calls anything else undefined; here both ends get ``NCCL_ERROR_INTERNAL_ERROR``;
* a send to oneself needs its receive in the same group;
* after a refused call nothing of its group is posted, and ``groupEnd`` says so again; a communicator that could not be
  made leaves a group open in its thread (seen with NCCL 2.28.9);
* one thread at a time uses a communicator; here a second one gets ``NCCL_ERROR_INVALID_USAGE``;
* ``abort`` ends what waits in the own communicator, and tells nobody else: peers wait on;
* a group that a thread records (`commrt.testing.graphs`) is posted by each replay. Of those that two ranks recorded
  with each other, the k-th of one must meet the k-th of the other; NCCL leaves open what happens otherwise, here both
  ends get ``NCCL_ERROR_INTERNAL_ERROR``;
* ``abort`` and ``destroy`` return when all graphs with the communicator's calls are forgotten.

Memory is given by raw addresses. There are no streams: work is done when the call that posts it returns.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from commrt.testing.graphs import Graph, recording

__all__ = [
    "NCCL_BFLOAT16",
    "NCCL_FLOAT16",
    "NCCL_FLOAT32",
    "NCCL_FLOAT64",
    "NCCL_INT8",
    "NCCL_INT32",
    "NCCL_INT64",
    "NCCL_UINT8",
    "NcclCommunicator",
    "NcclConfig",
    "NcclError",
    "available",
    "get_build_version",
    "get_unique_id",
    "get_version",
    "groupEnd",
    "groupStart",
]

available = True
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 0, 1, 2, 4
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
NBYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
UNIQUE_ID_NBYTES = 128
VERSION = 22809

UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = range(1, 7)
STATUSES = {
    UNHANDLED_CUDA_ERROR: "NCCL_ERROR_UNHANDLED_CUDA_ERROR",
    SYSTEM_ERROR: "NCCL_ERROR_SYSTEM_ERROR",
    INTERNAL_ERROR: "NCCL_ERROR_INTERNAL_ERROR",
    INVALID_ARGUMENT: "NCCL_ERROR_INVALID_ARGUMENT",
    INVALID_USAGE: "NCCL_ERROR_INVALID_USAGE",
    REMOTE_ERROR: "NCCL_ERROR_REMOTE_ERROR",
}
"""Ends at 6 as in CuPy, where 7 (in progress) raises `KeyError`."""


class NcclError(RuntimeError):
    """A status other than success."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(STATUSES[status])


@dataclass(frozen=True)
class NcclConfig:
    """Accepted and without effect."""

    split_share: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    """A send or a receive that was issued."""

    communicator: NcclCommunicator
    is_send: bool
    address: int
    count: int
    dtype: int
    peer: int


@dataclass(slots=True, eq=False)
class _Side:
    """All that one rank does with one peer in one group, in order."""

    calls: list[_Call]
    number: int = 0
    """Among those recorded with this peer, from 1 on; 0 if it was not."""
    done: bool = False
    status: int = 0


@dataclass(slots=True, eq=False)
class _Clique:
    """What the ranks of one unique id share."""

    ranks: int
    arrived: set[int] = field(default_factory=set)
    posted: dict[tuple[int, int], _Side] = field(default_factory=dict)
    """(rank, peer) to what the rank waits with for the peer: one thing, since calls return when it has happened."""


_changed = threading.Condition()
_cliques: dict[bytes, _Clique] = {}


class _Group(threading.local):
    """The group that a thread has open."""

    depth = 0
    status = 0
    """Of the first call that was refused."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_group = _Group()


def get_version() -> int:
    """Of the library at run time, as 10,000 * major + 100 * minor + patch."""
    return VERSION


def get_build_version() -> int:
    """Of the library that the binding was built with."""
    return VERSION


def get_unique_id() -> bytes:
    """What one rank makes and tells the others."""
    return secrets.token_bytes(UNIQUE_ID_NBYTES)


def groupStart() -> None:  # noqa: N802  # as in CuPy
    """Calls of this thread are gathered until the matching `groupEnd`; groups nest."""
    _group.depth += 1


def groupEnd() -> None:  # noqa: N802  # as in CuPy
    """Post what was gathered if this ends the outermost group, and wait until all of it has happened."""
    if _group.depth == 0:
        raise NcclError(INVALID_USAGE)
    _group.depth -= 1
    if _group.depth == 0:
        calls, _group.calls = _group.calls, []
        status, _group.status = _group.status, 0
        if status:
            raise NcclError(status)
        _run(calls)


def _refused(status: int) -> NcclError:
    """The error of a call, which an open group remembers."""
    _group.status = _group.depth and (_group.status or status)
    return NcclError(status)


def _not_made(status: int) -> NcclError:
    _group.depth += 1
    return NcclError(status)


class NcclCommunicator:
    """One rank of a clique; the constructor returns when all ranks have come."""

    _numbers: ClassVar[Iterator[int]] = iter(range(1, 1 << 62))

    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None) -> None:  # noqa: N803
        if not isinstance(commId, bytes):
            raise TypeError(f"Expected bytes, got {type(commId).__name__}")
        if len(commId) != UNIQUE_ID_NBYTES:
            raise ValueError(f"commId must be {UNIQUE_ID_NBYTES} bytes, got {len(commId)}")
        if not 0 <= rank < ndev:
            raise _not_made(INVALID_ARGUMENT)
        self._rank, self._id, self._users = rank, commId, 0
        self._recorded, self._graphs = [0] * ndev, 0
        self.comm = next(self._numbers)
        with _changed:
            self._clique = _cliques.setdefault(commId, _Clique(ndev))
            if self._clique.ranks != ndev or rank in self._clique.arrived:
                raise _not_made(INVALID_USAGE)
            self._clique.arrived.add(rank)
            _changed.notify_all()
            _changed.wait_for(lambda: len(self._clique.arrived) == ndev)

    def send(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """`count` values at `address` to `peer`."""
        self._issue(True, address, count, datatype, peer, stream)

    def recv(self, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """`count` values from `peer` to `address`."""
        self._issue(False, address, count, datatype, peer, stream)

    def _issue(self, is_send: bool, address: int, count: int, dtype: int, peer: int, stream: int) -> None:
        if not all(type(value) is int for value in (address, count, dtype, peer, stream)):
            raise TypeError("an integer is required")
        self._require_open()
        if not 0 <= peer < self._clique.ranks or dtype not in NBYTES or count < 0 or (count and not address):
            raise _refused(INVALID_ARGUMENT)
        call = _Call(self, is_send, address, count, dtype, peer)
        if _group.depth:
            _group.calls.append(call)
        else:
            _run([call])

    def _require_open(self) -> None:
        if not self.comm:
            raise _refused(INVALID_ARGUMENT)

    def check_async_error(self) -> None:
        """Raises nothing: NCCL does not report a peer of the same host that is gone either."""
        self._require_open()

    def abort(self) -> None:
        """End what waits in this communicator, from any thread; it cannot be used again."""
        with _changed:
            self.comm = 0
            for peer in range(self._clique.ranks):  # or it would read and write memory that is not ours any more
                self._clique.posted.pop((self._rank, peer), None)
            _changed.notify_all()
            _changed.wait_for(lambda: not self._graphs)

    destroy = abort

    def rank_id(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._clique.ranks

    def device_id(self) -> int:
        """There is one device."""
        return 0


def _run(calls: list[_Call]) -> None:
    """Let a whole group happen, in a recording later."""
    if (graph := recording()) is None:
        _happen(calls, {})
    else:
        with _changed, _exclusively({call.communicator for call in calls}):
            numbers = {end: _recorded(graph, *end) for end in _sides(calls)}
        graph.note(lambda: _happen(calls, numbers))


def _recorded(graph: Graph, communicator: NcclCommunicator, peer: int) -> int:
    """Which of the groups that were recorded with `peer` this is."""

    def forget() -> None:
        with _changed:
            communicator._graphs -= 1  # noqa: SLF001  # of this module
            _changed.notify_all()

    communicator._graphs += 1  # noqa: SLF001
    graph.on_reset(forget)
    communicator._recorded[peer] += 1  # noqa: SLF001
    return communicator._recorded[peer]  # noqa: SLF001


def _happen(calls: list[_Call], numbers: dict[tuple[NcclCommunicator, int], int]) -> None:
    """Post a whole group and wait until it has happened."""
    with _changed, _exclusively({call.communicator for call in calls}):
        sides = _sides(calls)
        for end, side in sides.items():
            side.number = numbers.get(end, 0)
        for (communicator, peer), side in sides.items():
            _post(communicator._clique, communicator.rank_id(), peer, side)  # noqa: SLF001  # of this module
        while not all(side.done or not communicator.comm for (communicator, _), side in sides.items()):
            _changed.wait()
        statuses = [side.status if side.done else REMOTE_ERROR for side in sides.values()]
    for status in filter(None, statuses):
        raise NcclError(status)


@contextmanager
def _exclusively(communicators: set[NcclCommunicator]) -> Iterator[None]:
    """Raise `NcclError` if another thread is inside one of `communicators`."""
    if any(communicator._users for communicator in communicators):  # noqa: SLF001  # of this module
        raise NcclError(INVALID_USAGE)
    for communicator in communicators:
        communicator._require_open()  # noqa: SLF001
        communicator._users += 1  # noqa: SLF001
    try:
        yield
    finally:
        for communicator in communicators:
            communicator._users -= 1  # noqa: SLF001


def _sides(calls: list[_Call]) -> dict[tuple[NcclCommunicator, int], _Side]:
    """The calls of a group by communicator and peer."""
    sides: dict[tuple[NcclCommunicator, int], _Side] = {}
    for call in calls:
        sides.setdefault((call.communicator, call.peer), _Side([])).calls.append(call)
    return sides


def _post(clique: _Clique, rank: int, peer: int, side: _Side) -> None:
    """Meet what `peer` waits with for this rank, or wait to be met; oneself is met at once."""
    if peer == rank:
        side.done, side.status = True, _transfer(side.calls, side.calls) and INVALID_USAGE
        return
    other = clique.posted.get((peer, rank))
    if other is None or not (_faces(side, other) or _faces(other, side)):
        clique.posted[rank, peer] = side
        return
    del clique.posted[peer, rank]
    side.status = other.status = (
        INTERNAL_ERROR
        if side.number != other.number
        else _transfer(side.calls, other.calls) or _transfer(other.calls, side.calls)
    )
    side.done = other.done = True
    _changed.notify_all()


def _faces(here: _Side, there: _Side) -> bool:
    """True if something is sent here and something received there: two ranks that only send never meet."""
    return any(call.is_send for call in here.calls) and not all(call.is_send for call in there.calls)


def _transfer(here: list[_Call], there: list[_Call]) -> int:
    """What is sent here to where it is received there, in order; the status if the two do not fit."""
    sends = [call for call in here if call.is_send]
    recvs = [call for call in there if not call.is_send]
    if [(call.count, call.dtype) for call in sends] != [(call.count, call.dtype) for call in recvs]:
        return INTERNAL_ERROR
    for send, recv in zip(sends, recvs, strict=True):
        ctypes.memmove(recv.address, send.address, send.count * NBYTES[send.dtype])
    return 0
