# SPDX-License-Identifier: Apache-2.0
"""Calls to torch's store that end in time, and parsers for what other ranks wrote there.

torch's own timeouts do not help when the process that holds the store is stopped: after one has expired, the client
asks the store to cancel the request, and waits without limit for its answer (torch 2.13).
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store

from commrt.errors import DeadlineExceeded, DisagreementError, PeerLost, Place
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future

ANSWER_S = 2.0
"""How long the store may take to answer, from when it can. So what waits on the store itself ends before this does."""
STORE_HOLDER = "the process that holds the store (rank 0, unless a launcher such as torchrun holds it)"
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, struct.error)
"""Exceptions that parsing malformed data can raise."""

T = TypeVar("T")
_idle: list[SimpleQueue[tuple[Callable[[], Any], Future[Any]]]] = []
"""Where threads of `start_call` take their next call from; a forked child has none of these threads."""
os.register_at_fork(after_in_child=_idle.clear)


def call_store(request: Callable[[], T], waits_s: float = 0.0, rank: int | None = None) -> T:
    """Return what `request`, which may use a store, returns to `rank`; it may wait for other ranks for `waits_s`.

    Another thread runs the request, and is abandoned `ANSWER_S` after that. Raises `DeadlineExceeded` then, `PeerLost`
    if the connection to the store broke, and whatever else `request` raises. Cost: 0.035 ms.
    """
    future, deadline = start_call(request), Deadline(limit_s := waits_s + ANSWER_S)
    while not future.done() and (left_s := deadline.left_s) > 0:
        with suppress(TimeoutError):  # what counts is whether the answer is there when we look
            future.exception(min(left_s, deadline.poll_s))
    if not future.done():
        what = f"the store gave no answer within {limit_s:g} s: {STORE_HOLDER} is stopped or cannot be reached"
        raise DeadlineExceeded(what, Place(rank=rank, peer=0))
    try:
        return future.result()
    except DistNetworkError as error:
        what = f"the connection to the store broke: {STORE_HOLDER} ended; look at its output"
        raise PeerLost(what, Place(rank=rank, peer=0)) from error


def start_call(call: Callable[[], T]) -> Future[T]:
    """Start `call` on a thread that no other call uses, and return the future of its result."""
    future: Future[T] = Future()
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_work, args=(calls,), daemon=True, name="commrt-store-call").start()
    calls.put((call, future))
    return future


def _work(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        _run(*calls.get())  # a function of its own, as an idle thread must keep nothing alive
        _idle.append(calls)


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class TimedStore:
    """The requests of torch's store, made by `rank`; each ends in time, see `call_store`. On any thread."""

    def __init__(self, connection: Store, rank: int, timeout_s: Callable[[], float]) -> None:
        self.connection = connection
        self._rank, self._timeout_s = rank, timeout_s

    def __getattr__(self, request: str) -> Callable[..., Any]:
        return lambda *args: self._call(lambda: getattr(self.connection, request)(*args))

    def _call(self, request: Callable[[], T]) -> T:
        return call_store(request, self._timeout_s(), self._rank)

    def read(self, key: str) -> bytes:
        """Return what stands under `key`, empty if nothing does."""
        store = self.connection
        return self._call(lambda: store.get(key) if store.check([key]) else b"")


def clone_connection(store: Store) -> Store:
    """Return a second connection to `store`, where torch can make one: requests on one connection wait in a line."""
    with suppress(AttributeError, RuntimeError):
        another: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub is behind
        return another
    return store


def parse(what: str, text: bytes | str, read: Callable[[bytes], T]) -> T:
    """Return ``read(text)``; raise `DisagreementError`, which names it `what`, if `read` finds it malformed.

    >>> parse("its step", b"3", int)
    3
    """
    try:
        return read(text.encode() if isinstance(text, str) else text)
    except MALFORMED as error:
        raise malformed(what, text) from error


def malformed(what: str, text: bytes | str) -> DisagreementError:
    """Return the error for a value that cannot be parsed."""
    return DisagreementError(
        f"what the store holds as {what} cannot be parsed: {text[:60]!r}. Another version of commrt or another "
        "program writes to it: start all ranks with one version, with a MASTER_PORT of their own"
    )


def require(is_as_expected: object) -> None:
    """Raise `ValueError` unless the condition holds; for use in functions that `parse` calls."""
    if not is_as_expected:
        raise ValueError("not as expected")


def parse_int(value: object, least: int = 0) -> int:
    """Return `value` as a whole number of at least `least` and below 2^63; raise `ValueError`."""
    require(isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63)
    return int(value)  # type: ignore[call-overload, no-any-return]  # it is one


def parse_list(text: bytes, length: int | None = None) -> list[Any]:
    """Return a JSON list of `length`; raise `ValueError`."""
    found = json.loads(text)
    require(isinstance(found, list) and length in (None, len(found)))
    return list(found)


def parse_dict(text: bytes) -> Mapping[str, Any]:
    """Return a JSON object; raise `ValueError`."""
    found = json.loads(text)
    require(isinstance(found, dict))
    return dict(found)
