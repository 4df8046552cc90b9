# SPDX-License-Identifier: Apache-2.0
"""Threads of one process as ranks: the reference transport, with NCCL's semantics and no buffering.

A send completes when its receive takes it. A schedule that would deadlock on GPUs deadlocks here
too, and the error at its deadline prints which rank waits for which.

Each rank's thread runs its own groups, and copies what it matches; any thread may end a rank.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from commrt.errors import (
    OTHER_PROGRAMS,
    CallMismatch,
    DeadlineExceeded,
    PeerLost,
    Place,
    SizeMismatch,
    TransportClosed,
    TransportError,
)
from commrt.threads.deadline import clock
from commrt.transport.bind_checks import split_self
from commrt.transport.protocol import Exchange, P2PGroup, Tag, Transport


@dataclass(slots=True, eq=False)
class _Post:
    """One end of a transfer that waits for its other end.

    The thread of the rank that comes last writes `done` and `mismatch` of both ends; its own rank's
    writes `is_given_up`.
    """

    peer: int
    data: Tensor
    call: int
    done: bool = False
    is_given_up: bool = False
    """Its rank waits no more: nothing is copied from it, or to it."""
    mismatch: type[TransportError] | None = None


class Fabric:
    """Connects the ranks of one process. All copies between ranks happen under its one lock."""

    def __init__(self, ranks: int, timeout_s: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._sends, self._recvs = (
            defaultdict[tuple[int, int], deque[_Post]](deque) for _ in range(2)
        )
        """What waits from one rank to another, oldest first; what is given up stays, for errors."""
        self.gone: set[int] = set()
        """Ranks that have left; `leave` adds them, on any thread, and their transports look."""

    def transport(self, rank: int) -> LocalTransport:
        """Return the transport of `rank`, for one thread at a time."""
        return LocalTransport(self, rank)

    def leave(self, rank: int) -> None:
        """Remove `rank`; ranks that wait for it raise `PeerLost`."""
        with self._changed:
            self.gone.add(rank)
            self._changed.notify_all()

    def run(self, rank: int, group: P2PGroup, tag: Tag, timeout_s: float) -> None:
        """Post all messages of `group` for `rank`, then wait until all are transferred.

        What is not when this raises never will be.
        """
        end_s = clock.now_s() + timeout_s

        def place(post: _Post) -> Place:
            return tag.place(rank, group.hop, post.peer, post.data.nbytes)

        with self._changed:
            posts = self._post(rank, group, tag.call)
            try:
                self._wait(rank, posts, end_s, timeout_s, place)
            except BaseException:
                for post in posts:
                    post.is_given_up = True
                raise
            for post in posts:
                if post.mismatch:
                    what = (
                        "the two ends of a transfer differ in call, size or dtype:"
                        f" {OTHER_PROGRAMS}"
                    )
                    raise post.mismatch(what, place(post))

    def _wait(
        self,
        rank: int,
        posts: Sequence[_Post],
        end_s: float,
        timeout_s: float,
        place: Callable[[_Post], Place],
    ) -> None:
        """Wait until all `posts` of `rank` are done, by whichever rank came last."""
        waiting = posts
        while True:
            waiting = [post for post in waiting if not post.done]
            if not waiting:
                return
            if clock.now_s() >= end_s:
                ranks = sorted({post.peer for post in waiting})
                raise DeadlineExceeded(
                    f"timed out: no transfer with ranks {ranks} within {timeout_s:g} s; who waits"
                    f" for whom: {self._waits()}",
                    place(waiting[0]),
                )
            if rank in self.gone:
                raise TransportClosed("this rank closed its transport", place(waiting[0]))
            for post in waiting:
                if post.peer in self.gone:
                    raise PeerLost(
                        "the peer left before this transfer: look at its own error", place(post)
                    )
            self._changed.wait(min(end_s - clock.now_s(), clock.slice_s))

    def _post(self, rank: int, group: P2PGroup, call: int) -> list[_Post]:
        posts = []
        for message in group.sends:
            post = _Post(message.peer, message.data, call)
            posts.append(post)
            self._sends[rank, post.peer].append(post)
            self._match(rank, post.peer)
        for message in group.recvs:
            post = _Post(message.peer, message.data, call)
            posts.append(post)
            self._recvs[post.peer, rank].append(post)
            self._match(post.peer, rank)
        return posts

    def _match(self, src: int, dst: int) -> None:
        sends = self._sends[src, dst]
        recvs = self._recvs[src, dst]
        while sends and recvs:
            if sends[0].is_given_up:
                sends.popleft()
                continue
            if recvs[0].is_given_up:
                recvs.popleft()
                continue
            send = sends.popleft()
            recv = recvs.popleft()
            if send.call != recv.call:
                send.mismatch = recv.mismatch = CallMismatch
            elif send.data.numel() != recv.data.numel() or send.data.dtype != recv.data.dtype:
                send.mismatch = recv.mismatch = SizeMismatch
            else:
                recv.data.copy_(send.data)
            send.done = recv.done = True
            self._changed.notify_all()

    def _waits(self) -> str:
        """Return the wait-for graph as text: one edge per rank that waits for another."""
        edges = {key for key, posts in self._sends.items() if posts}
        edges |= {(dst, src) for (src, dst), posts in self._recvs.items() if posts}
        return ", ".join(f"{a}->{b}" for a, b in sorted(edges))


class LocalTransport(Transport):
    """One rank of a `Fabric`; a `Transport`. Its own state is `timeout_s` only."""

    kind = "local"
    one_host = True

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self.rank = rank
        self.members = range(fabric.ranks)
        self.timeout_s = fabric.timeout_s

    def bind(self, group: P2PGroup) -> Exchange:
        rest, copies = split_self(group, self.rank, self.members)

        def run(tag: Tag) -> None:
            if self.rank in self._fabric.gone:
                raise TransportClosed("the transport was closed", tag.place(self.rank, rest.hop))
            for source, target in copies:
                target.copy_(source)
            if rest.sends or rest.recvs:
                self._fabric.run(self.rank, rest, tag, self.timeout_s)

        return run

    def close(self) -> None:
        """Leave the fabric; peers that still wait for this rank raise `PeerLost`."""
        self._fabric.leave(self.rank)

    abort = close
