# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of a process group's CPU tensors: in any order, with tags, on Gloo's sockets.

Gloo connects two ranks when both have posted a message to the other, and makes the one who is first
wait for that. So the first message to a rank, and those that follow before it is posted, are posted
on a thread of their own. Any thread posts, and waits. A thread of its own waits for works that the
caller dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import partial
from math import inf
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor

from commrt.c10d.call_options import NO_TIMEOUT, seconds_of
from commrt.c10d.dist_errors import as_dist_error
from commrt.errors import (
    CommrtError,
    DeadlineExceeded,
    PeerLost,
    Place,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.runtime.untraced import untraced
from commrt.runtime.world import World
from commrt.threads.calls import start_call
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future
from commrt.transport.gloo import UNUSED_TAG, GlooTransport

SHORTEST_S = 0.001
"""The shortest timeout of a wait that torch does not take for the group's own."""


class HostMessages:
    """Sends and receives of CPU tensors; for threads see the module.

    Gloo takes a message back if nobody references its work. So works that the caller drops before
    they end are kept until they do, or until their timeout.
    """

    def __init__(self, gloo: GlooTransport, world: World) -> None:
        self._gloo = gloo
        self._world = world
        self._posting = RLock()  # held to find the latest, and to replace it
        # by peer: the latest message that could not be posted at once; ended well, both are
        # connected
        self._latest: dict[int | None, Future[dist.Work]] = {}
        self._sends: WeakSet[HostWork] = WeakSet()
        self._dropped_sends = DroppedWorks()
        self._dropped_receives = DroppedWorks()
        self.timeout_s = world.timeout_s
        """Of messages posted from now on. Set by the group, on any thread.

        Gloo connects two ranks within the timeout that the group began with.
        """

    def post(self, data: Tensor, peer: int | None, tag: int, *, is_send: bool) -> dist.Work:
        """Begin to send `data` to `peer`, or to receive it from there; from any rank if None."""
        if tag == UNUSED_TAG:
            raise UsageError(f"tag {tag} is one that commrt uses itself: take a smaller one")
        if peer == self._world.rank:
            raise UsageError(f"rank {peer} has no connection to itself: copy the tensor instead")
        what = f"{'send' if is_send else 'receive'} with tag {tag}"
        place = Place(self._world.rank, peer, bucket=what, nbytes=data.nbytes)
        self._dropped_sends.start_waiting()
        self._dropped_receives.start_waiting()
        begun = self._begin(partial(self._gloo.post, data, peer, tag, is_send=is_send), peer)
        work = HostWork(
            self, begun, data, place, self._dropped_sends if is_send else self._dropped_receives
        )
        if is_send:
            self._sends.add(work)
        return work

    def _begin(self, post: Callable[[], dist.Work], peer: int | None) -> Future[dist.Work]:
        """Return the future of what `post` returns, which posts a message to `peer`, after all
        earlier ones to it.
        """
        with self._posting:
            before = self._latest.get(peer)
            if before is None or not before.done() or before.exception() is not None:
                begun = start_call(partial(_post_after, before, post))
                self._latest[peer] = begun
                return begun
        begun = Future()
        try:
            begun.set_result(post())
        except RuntimeError as error:
            begun.set_exception(error)
        return begun

    def finish_sends(self, limit_s: float | None = None) -> None:
        """Wait for the end of all sends, or errors: at most `limit_s`, else each its timeout."""
        deadline = Deadline(inf if limit_s is None else limit_s)
        for work in [work for work in self._sends if not work.was_waited_for]:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(min(self.timeout_s, deadline.left_s), SHORTEST_S)))
        with suppress(TimeoutError):
            for _ in range(2):  # the first wait may have begun before the last work was dropped
                waiting = self._dropped_sends.start_waiting()
                waiting.result(limit_s and max(deadline.left_s, 0.0))

    def explained(self, error: RuntimeError, place: Place, waited_s: float) -> TransportError:
        """Return what Gloo's `error`, after up to `waited_s`, means.

        It may say only that connecting took too long, to a rank that is gone.
        """
        ended = self._world.comm_thread.failure
        if isinstance(ended, TransportClosed):  # aborted or reconfigured here
            return TransportClosed(ended.what, place)
        is_gone = (
            isinstance(ended, PeerLost)
            and place.peer is not None
            and ended.place.peer == place.peer
        )
        is_late = "imed out" in str(error) or "imeout" in str(error)
        # "Connection refused": nobody listens
        if is_late and not is_gone and "refused" not in str(error):
            what = f"timed out: the peer did not do its part within {waited_s:g} s"
            return DeadlineExceeded(f"{what}: slow, stopped, or running another program", place)
        return PeerLost(
            "the connection to the peer broke: its process ended or gave up; look at its own"
            " output",
            place,
        )

    def close(self) -> None:
        """Close all connections."""
        self._gloo.close()


def _post_after(before: Future[dist.Work] | None, post: Callable[[], dist.Work]) -> dist.Work:
    if before is not None:
        before.exception()  # waits
    return post()


class DroppedWorks:
    """Works of Gloo that nobody waits for any more, which are kept until they end.

    Any thread adds to them, at any place. Any thread calls `start_waiting`; of those that this
    starts one runs at a time, which removes them.
    """

    def __init__(self) -> None:
        self._starting = RLock()  # held to replace `_waiting`
        self._kept: deque[tuple[Future[dist.Work], Tensor, float]] = deque()
        self._waiting: Future[None] = Future()
        self._waiting.set_result(None)

    def keep(self, begun: Future[dist.Work], data: Tensor, timeout_s: float) -> None:
        """Keep what was `begun` with `data`, and dropped.

        Starts nothing, since garbage may be collected at any place.
        """
        self._kept.append((begun, data, timeout_s))

    def start_waiting(self) -> Future[None]:
        """Wait for all kept works, on a thread of its own; return the future of their end."""
        if self._kept and self._waiting.done():
            with self._starting:
                if self._kept and self._waiting.done():  # no other thread was faster
                    self._waiting = start_call(self._wait)
        return self._waiting

    def _wait(self) -> None:
        while self._kept:
            begun, _, timeout_s = self._kept[0]
            with suppress(RuntimeError, CommrtError):
                _outcome(begun, timeout_s)
            self._kept.popleft()


def _outcome(begun: Future[dist.Work], limit_s: float) -> bool:
    """Wait for the end of what was `begun`, and of posting it; raise Gloo's error."""
    deadline = Deadline(limit_s)
    try:
        work = begun.result(limit_s)
    except TimeoutError as error:
        raise RuntimeError("timed out: the peer posted no message") from error
    return work.wait(timedelta(seconds=max(deadline.left_s, SHORTEST_S)))


@untraced
class HostWork(dist.Work):
    """A send or a receive of Gloo, with errors that name the peer.

    Any thread may ask it, and one at a time waits; later waits end as the first one did. If nobody
    has waited when it is dropped, it is `kept`.
    """

    def __init__(
        self,
        messages: HostMessages,
        begun: Future[dist.Work],
        data: Tensor,
        place: Place,
        kept: DroppedWorks,
    ) -> None:
        super().__init__()
        self._messages = messages
        self._begun = begun
        self._data = data
        self._place = place
        self._timeout_s = messages.timeout_s
        self._kept = kept
        self.was_waited_for = False
        """Set by `wait` only: Gloo would wait a second time for another message of its kind."""
        self._failure: CommrtError | None = None  # of that wait

    def __del__(self) -> None:
        if not self.was_waited_for:
            self._kept.keep(self._begun, self._data, self._timeout_s)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when it is done; see `GroupWork.wait`."""
        if self._failure is not None:
            raise copy(self._failure)
        if self.was_waited_for:
            return True
        limit_s = seconds_of(timeout) or self._timeout_s
        try:
            return _outcome(self._begun, limit_s)
        except CommrtError as error:  # the group was closed
            self._failure = as_dist_error(error)
            raise copy(self._failure) from error
        except RuntimeError as error:
            ended = self._messages.explained(error, self._place, limit_s)
            self._failure = as_dist_error(ended)
            raise copy(self._failure) from error
        finally:
            self.was_waited_for = True

    def is_completed(self) -> bool:
        """Return True if it is done. Never waits."""
        return self._begun.done() and (
            self._begun.exception() is not None or self._begun.result().is_completed()
        )

    def is_success(self) -> bool:
        """Return True unless it has ended in an error."""
        return self.exception() is None

    def exception(self) -> Any:
        """Return the error in which it has ended, None while there is none. Never waits."""
        if not self._begun.done():
            return None
        return self._begun.exception() or self._begun.result().exception()

    def result(self) -> list[Tensor]:
        """Return the tensor that was sent or received."""
        return [self._data]

    def source_rank(self) -> int:
        """Return the rank that a receive from any rank had its data from."""
        return self._begun.result()._source_rank()  # noqa: SLF001  # torch calls both

    _source_rank = source_rank
