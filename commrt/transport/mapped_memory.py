# SPDX-License-Identifier: Apache-2.0
"""The memory that ranks of one host map of each other: pages of words, and segments for buffers.

Each rank has a page with a word for every member, into which that member writes how far it has
come. A rank reads a number that its peer has written to its page before it trusts the mapping:
drivers have been wrong about what they can reach.

Any thread may allocate a buffer, or let go of one; all else is for the thread that exchanges, or
later closes. Kernels write the members' words (`commrt.transport.signals`); of a page this module
writes only the number at its end.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.utils.dlpack import from_dlpack

from commrt.errors import SizeMismatch, TransportError, UsageError
from commrt.store.client import call_store
from commrt.store.parsing import require, typed
from commrt.store.records import gather
from commrt.transport.ipc import IpcMemory

WORD_NBYTES = 128
"""A word has a cache line for itself."""
_mapped_by_peers: list[object] = []
"""What peers had not unmapped when `MappedMemory.close` gave up: kept until this process ends."""
LARGER = 2
"""A freed segment serves again for buffers down to this many times smaller than it."""


class _Page(NamedTuple):
    """What a rank tells the others of its page."""

    host: str
    handle: str
    nonce: int


class _Location(NamedTuple):
    """Where a buffer lies, for peers."""

    handle: str
    segment_nbytes: int
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """An allocation that peers can map."""

    memory: Any
    address: int
    nbytes: int
    handle: str


class MappedMemory:
    """What one rank and its `local_peers` map of each other. All members make it, on its own store.

    `local_peers` is empty on all members of a host if one of them cannot map another's memory; then
    `refusal` says why, and this is closed. What is public never changes.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        memory: IpcMemory,
        host: str,
    ) -> None:
        self._store = store
        self.rank = rank
        self.members = members
        self.memory = memory
        self._used: dict[int, _Segment] = {}  # by address
        self._free: list[_Segment] = []
        self._lock = threading.RLock()  # around both; a collection amid one may release a segment
        self._keeps = True  # until `close`: segments that nobody uses any more, for other buffers
        self._opened: dict[str, Any] = {}  # segments of peers, by handle
        self._shares = 0  # calls of `share`
        self._page = memory.allocate((len(members) + 1) * WORD_NBYTES)
        self._pages = dict[int, Any]()
        nonce = secrets.randbits(62)
        _nonce_of(self._page).fill_(nonce)
        self.memory.synchronize()
        handle = ""
        verdict = ""
        try:
            handle = self.memory.handle(self._page).hex()
        except RuntimeError as error:
            verdict = f"the memory of rank {self.rank} cannot be mapped ({error})"
        own = _Page(host, handle, nonce)
        pages = gather(PrefixStore("pages", store), rank, members, own, timeout_s, _parse_page)
        there = {
            peer: page for peer, page in pages.items() if page.host == host and peer != self.rank
        }
        try:
            self._pages = {
                peer: self._opened_page(page) for peer, page in there.items() if page.handle
            }
        except RuntimeError as error:
            verdict = f"rank {self.rank} cannot map the memory of another rank ({error})"
        verdicts = gather(
            PrefixStore("verdicts", store), rank, members, verdict, timeout_s, _parse_verdict
        )
        self.refusal = next(
            (verdicts[peer] for peer in sorted([*there, rank]) if verdicts[peer]), ""
        )
        self.local_peers: Sequence[int] = sorted(there)
        """The other ranks of this host, in ascending order."""
        if self.refusal:
            self.close(timeout_s)
            self.local_peers = ()

    def _opened_page(self, page: _Page) -> Any:
        opened = self._open(page.handle, (len(self.members) + 1) * WORD_NBYTES)
        if int(_nonce_of(opened)) != page.nonce:
            raise RuntimeError("its page shows other numbers than it has written")
        return opened

    def outbox(self, peer: int) -> Tensor:
        """Return what this rank signals to `peer`: int32 [1] in the memory of that."""
        return self._word(self._pages[peer], self.rank)

    def inbox(self, peer: int) -> Tensor:
        """Return what `peer` signals to this rank: int32 [1]."""
        return self._word(self._page, peer)

    def _word(self, page: Any, rank: int) -> Tensor:
        begin = self.members.index(rank) * WORD_NBYTES
        return from_dlpack(page)[begin : begin + 4].view(torch.int32)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [numel] that peers can map; reused if unused; waits for the device."""
        nbytes = max(1, numel) * dtype.itemsize
        with self._lock:
            fits = [
                segment for segment in self._free if nbytes <= segment.nbytes <= LARGER * nbytes
            ]
            segment = (
                min(fits, key=lambda segment: segment.nbytes) if fits else self._new_segment(nbytes)
            )
            if fits:
                self._free.remove(segment)
                self.memory.synchronize()  # peers, or this rank, may still read it
            self._used[segment.address] = segment
        array = self.memory.again(segment.memory)
        finalize(array, self._release, segment)
        return from_dlpack(array)[:nbytes].view(dtype)[:numel].zero_()

    def _new_segment(self, nbytes: int) -> _Segment:
        memory = self.memory.allocate(nbytes)
        address = from_dlpack(memory).data_ptr()
        return _Segment(memory, address, nbytes, self.memory.handle(memory).hex())

    def _release(self, segment: _Segment) -> None:
        """Take back a segment whose last array is gone; called on any thread."""
        with self._lock:
            del self._used[segment.address]
            if self._keeps:
                self._free.append(segment)

    def _locate(self, buffer: Tensor) -> _Location:
        """Return where `buffer` lies; it may be a part of what was allocated."""
        for segment in tuple(self._used.values()):
            begin = buffer.data_ptr() - segment.address
            if 0 <= begin < segment.nbytes:
                return _Location(segment.handle, segment.nbytes, begin, buffer.nbytes)
        raise UsageError(
            "this buffer is in no memory that peers can map: allocate it with allocate_shared()"
        )

    def share(self, buffers: Sequence[Tensor], timeout_s: float) -> list[dict[int, Tensor]]:
        """Return for each of `buffers` that of each local peer.

        Collective; all from `allocate`, in one order.
        """
        self._shares += 1
        own = [self._locate(buffer) for buffer in buffers]
        # a rank that is alone on its host shares nothing
        here = sorted([self.rank, *self.local_peers])
        store = PrefixStore(f"share {self._shares}", self._store)
        shared = gather(store, self.rank, here, own, timeout_s, _parse_locations)
        for peer in self.local_peers:
            if [each.nbytes for each in shared[peer]] != [each.nbytes for each in own]:
                raise SizeMismatch(
                    f"rank {peer} shares buffers of other sizes: start all ranks with the same code"
                )
        return [
            {peer: self._in_peer(shared[peer][number], buffer) for peer in self.local_peers}
            for number, buffer in enumerate(buffers)
        ]

    def _in_peer(self, location: _Location, like: Tensor) -> Tensor:
        segment = from_dlpack(self._open(location.handle, location.segment_nbytes))
        return segment[location.begin : location.begin + location.nbytes].view(like.dtype)

    def _open(self, handle: str, nbytes: int) -> Any:
        if handle not in self._opened:
            self._opened[handle] = self.memory.open(bytes.fromhex(handle), nbytes)
        return self._opened[handle]

    def close(self, linger_s: float) -> None:
        """Unmap all memory of peers, and give up this rank's.

        What a peer has not unmapped within `linger_s` is not freed before this process ends. With
        0, after a failure, nobody is waited for: a lost rank never unmaps, and the driver keeps
        what others have mapped.
        """
        opened = self._opened
        self._opened = {}
        self._pages = {}
        for segment in opened.values():
            self.memory.close(segment)
        try:
            call_store(lambda: self._wait_until_unmapped(linger_s), linger_s)
        except (RuntimeError, TransportError):  # a peer goes on, or the store is gone
            _mapped_by_peers.append((self._page, [*self._used.values(), *self._free]))
        self._keeps = False
        self._free.clear()

    def leave_to_parent(self) -> None:
        """Let a forked child drop buffers: a thread that is not here may have held the lock."""
        self._lock = threading.RLock()

    def _wait_until_unmapped(self, limit_s: float) -> None:
        self._store.set(f"unmapped/{self.rank}", "")
        if limit_s:
            self._store.wait(
                [f"unmapped/{peer}" for peer in self.local_peers], timedelta(seconds=limit_s)
            )


def _nonce_of(page: Any) -> Tensor:
    return from_dlpack(page)[-8:].view(torch.int64)


def _parse_page(data: bytes) -> _Page:
    page = _Page(*typed(json.loads(data), str, str, int))
    bytes.fromhex(page.handle)  # raises
    return page


def _parse_verdict(data: bytes) -> str:
    return str(*typed([json.loads(data)], str))


def _parse_locations(data: bytes) -> list[_Location]:
    locations = [_Location(*typed(each, str, int, int, int)) for each in json.loads(data)]
    require(
        all(
            bytes.fromhex(each.handle) and each.begin + each.nbytes <= each.segment_nbytes
            for each in locations
        )
    )
    return locations
