# SPDX-License-Identifier: Apache-2.0
"""Requests to torch's store that end in time, whoever holds it.

A request runs on a thread of its own, and any thread may wait for it. Knows no keys and no values.
The end of the process waits for those that still run, then stops their threads, until
`skip_wait_at_exit` is called.

torch's own timeouts do not help when the process that holds the store is stopped: after one has
expired, the client asks the store to cancel the request, and waits without limit for its answer
(torch 2.13).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, PeerLost, Place
from commrt.threads.calls import outwait_calls, start_call
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future

ANSWER_S = 2.0
"""How long the store may take to answer, from when it can.

So what waits on the store itself ends before this does.
"""
STORE_HOLDER = (
    "the process that holds the store (rank 0, unless a launcher such as torchrun holds it)"
)

T = TypeVar("T")

_asking = set[int]()
"""Threads that wait for a store; each adds and removes itself."""
os.register_at_fork(after_in_child=_asking.clear)


def call_store(request: Callable[[], T], waits_s: float = 0.0, rank: int | None = None) -> T:
    """Return what `request`, which may use a store, returns to `rank`.

    It may wait for other ranks for `waits_s`. Another thread runs the request, and is abandoned
    `ANSWER_S` after that. Raises `DeadlineExceeded` then, `PeerLost` if the connection to the store
    broke, and whatever else `request` raises. Cost: 0.035 ms.
    """
    future = start_request(request)
    limit_s = waits_s + ANSWER_S
    deadline = Deadline(limit_s)
    while not future.done():
        left_s = deadline.left_s
        if left_s <= 0:
            break
        with suppress(TimeoutError):  # what counts is whether the answer is there when we look
            future.exception(min(left_s, deadline.poll_s))
    if not future.done():
        raise no_answer(limit_s, rank)
    try:
        return future.result()
    except DistNetworkError as error:
        what = f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
        raise PeerLost(what, Place(rank=rank, peer=0)) from error


def start_request(request: Callable[[], T]) -> Future[T]:
    """Start `request`, which may wait for a store without limit, and return its future."""
    return start_call(partial(ask, request))


def ask(request: Callable[[], T]) -> T:
    """Return what `request` to a store returns, on a thread that the end of the process stops."""
    thread = get_ident()
    _asking.add(thread)
    try:
        return request()
    finally:
        _asking.discard(thread)


def no_answer(limit_s: float, rank: int | None) -> DeadlineExceeded:
    """Return the error of a request of `rank` that the store has not answered within `limit_s`."""
    what = (
        f"timed out: the store gave no answer within {limit_s:g} s: {STORE_HOLDER} is stopped, or"
        " this host does not reach it"
    )
    return DeadlineExceeded(what, Place(rank=rank, peer=0))


class TimedStore:
    """The requests of torch's store by `rank`; each ends in time, see `call_store`. On any thread.

    Has all methods of a store. After a request that was not answered all others fail at once, on
    every thread: a rank waits for a lost store once only.
    """

    def __init__(self, connection: Store, rank: int, timeout_s: Callable[[], float]) -> None:
        self.connection = connection
        """torch's store, for requests that must go on after that, or wait longer.

        Written by others: `ElasticMembership.close` puts another one in its place, so that this one
        may end.
        """
        self._rank = rank
        self._timeout_s = timeout_s
        self._silence: DeadlineExceeded | None = None  # of the request that was not answered

    def __getattr__(self, request: str) -> Callable[..., Any]:
        return lambda *args: self._call(lambda: getattr(self.connection, request)(*args))

    def read(self, key: str) -> bytes:
        """Return what stands under `key`, empty if nothing does."""
        store = self.connection
        return self._call(lambda: store.get(key) if store.check([key]) else b"")

    def _call(self, request: Callable[[], T]) -> T:
        if self._silence is not None:
            raise copy(self._silence)
        try:
            return call_store(request, self._timeout_s(), self._rank)
        except DeadlineExceeded as silence:
            self._silence = silence
            raise


def clone_connection(store: Store, timeout_s: float) -> Store:
    """Return a second connection to `store`, if torch can: requests on one connection queue.

    Raises `DeadlineExceeded` or `PeerLost` if nobody holds the store any more; torch itself tries
    for minutes to reach it.
    """
    with suppress(AttributeError, RuntimeError):
        another: Store = call_store(store.clone, timeout_s)  # type: ignore[attr-defined]  # torch's stub is behind
        return another
    return store


@atexit.register
def _at_exit() -> None:
    """Wait for requests that nobody needs any more: the end of the store would wake them.

    Then stop the threads of those without an answer. Up to Python 3.13 a thread that comes back
    from C++ while the interpreter ends aborts the process, and torch lets nobody end its wait. So
    C's own ``pause`` handles a signal that would be ignored otherwise.
    """
    outwait_calls(ANSWER_S)
    if _asking:
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGURG, libc.pause)
    for thread in _asking.copy():  # this thread has the GIL, so none of those has
        signal.pthread_kill(thread, signal.SIGURG)


def skip_wait_at_exit() -> None:
    """Let this process end without that wait: it holds the store, which ends after Python."""
    atexit.unregister(_at_exit)
