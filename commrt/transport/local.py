# SPDX-License-Identifier: Apache-2.0
"""Threads of one process as ranks, with NCCL's semantics and no more: the reference transport.

Nothing is buffered: a send completes when its receive takes it. So a schedule that would deadlock on GPUs
deadlocks here, and its deadline prints who waits for whom.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor

from commrt.errors import DeadlineExceeded, PeerLost, Place, SizeMismatch, TransportClosed, TransportError
from commrt.transport.protocol import Exchange, Group, Moment, never, split_self, zeros

__all__ = ["Fabric", "LocalTransport"]


@dataclass(slots=True, eq=False)
class _Post:
    """One end of a transfer that waits for the other."""

    data: Tensor
    done: bool = False
    error: type[TransportError] | None = None


@dataclass(slots=True)
class _Line:
    """One direction between two ranks: what is posted at either end, oldest first."""

    sends: deque[_Post] = field(default_factory=deque)
    recvs: deque[_Post] = field(default_factory=deque)


class Fabric:
    """What the ranks of one process share. One lock; copies happen under it."""

    def __init__(self, ranks: int, timeout_s: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._lines: defaultdict[tuple[int, int], _Line] = defaultdict(_Line)
        self._gone: set[int] = set()

    def transport(self, rank: int) -> LocalTransport:
        """The transport of one rank; to be used by one thread at a time."""
        return LocalTransport(self, rank)

    def leave(self, rank: int) -> None:
        """Take a rank away; whoever waits for it gets `PeerLost`."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def run(self, rank: int, group: Group, moment: Moment, timeout_s: float) -> None:
        """Post a whole group, then wait until all of it has happened."""
        deadline = monotonic() + timeout_s
        with self._changed:
            posts = self._post(rank, group)
            while not all(post.done for _, post in posts):
                self._raise_if_lost(rank, posts, group, moment)
                if not self._changed.wait(deadline - monotonic()):
                    raise self._late(rank, posts, group, moment, timeout_s)
            self._raise_if_mismatched(rank, posts, group, moment)

    def _post(self, rank: int, group: Group) -> list[tuple[int, _Post]]:
        posts: list[tuple[int, _Post]] = []
        for parcel in group.sends:
            posts.append((parcel.peer, _Post(parcel.data)))
            self._lines[rank, parcel.peer].sends.append(posts[-1][1])
            self._match(self._lines[rank, parcel.peer])
        for parcel in group.recvs:
            posts.append((parcel.peer, _Post(parcel.data)))
            self._lines[parcel.peer, rank].recvs.append(posts[-1][1])
            self._match(self._lines[parcel.peer, rank])
        return posts

    def _match(self, line: _Line) -> None:
        while line.sends and line.recvs:
            send, recv = line.sends.popleft(), line.recvs.popleft()
            if send.data.numel() == recv.data.numel() and send.data.dtype == recv.data.dtype:
                recv.data.copy_(send.data)
            else:
                send.error = recv.error = SizeMismatch
            send.done = recv.done = True
            self._changed.notify_all()

    def _raise_if_lost(self, rank: int, posts: list[tuple[int, _Post]], group: Group, moment: Moment) -> None:
        for peer, post in posts:
            if not post.done and peer in self._gone:
                place = _place(rank, peer, post, group, moment)
                raise PeerLost("the peer left before this transfer: look at its own error", place)
            if rank in self._gone:
                raise TransportClosed("this rank closed its transport", _place(rank, peer, post, group, moment))

    def _raise_if_mismatched(self, rank: int, posts: list[tuple[int, _Post]], group: Group, moment: Moment) -> None:
        for peer, post in posts:
            if post.error is not None:
                raise post.error(
                    "the two ends of a transfer differ in size or dtype: the ranks run different programs",
                    _place(rank, peer, post, group, moment),
                )

    def _late(
        self, rank: int, posts: list[tuple[int, _Post]], group: Group, moment: Moment, timeout_s: float
    ) -> DeadlineExceeded:
        waiting = [(peer, post) for peer, post in posts if not post.done]
        peers = sorted({peer for peer, _ in waiting})
        what = f"no transfer with ranks {peers} within {timeout_s:g} s; who waits for whom: {self._waits()}"
        return DeadlineExceeded(what, _place(rank, *waiting[0], group, moment))

    def _waits(self) -> str:
        """The wait-for graph, one edge per rank that waits for another."""
        edges = {(src, dst) for (src, dst), line in self._lines.items() if line.sends}
        edges |= {(dst, src) for (src, dst), line in self._lines.items() if line.recvs}
        return ", ".join(f"{a}->{b}" for a, b in sorted(edges))


class LocalTransport:
    """One rank of a `Fabric`; a `Transport`."""

    kind = "local"
    allocate = staticmethod(zeros)
    capture = staticmethod(never)

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self.rank = rank
        self.members = range(fabric.ranks)
        self.timeout_s = fabric.timeout_s
        self._closed = False

    def bind(self, group: Group) -> Exchange:
        """See `Transport.bind`."""
        rest, copies = split_self(group, self.rank, self.members)

        def exchange(moment: Moment) -> None:
            if self._closed:
                raise TransportClosed("the transport was closed", Place(self.rank, None, *moment, rest.hop))
            for source, target in copies:
                target.copy_(source)
            if rest.sends or rest.recvs:
                self._fabric.run(self.rank, rest, moment, self.timeout_s)

        return exchange

    def close(self) -> None:
        """Leave the fabric; peers that still wait for this rank get `PeerLost`."""
        self._closed = True
        self._fabric.leave(self.rank)

    abort = close


def _place(rank: int, peer: int, post: _Post, group: Group, moment: Moment) -> Place:
    return Place(rank, peer, moment.step, moment.bucket, group.hop, post.data.nbytes)
