# SPDX-License-Identifier: Apache-2.0
"""Futures that Ctrl-C cannot break; on a GPU they may be set while work is still queued.

One thread sets a future, and any may wait for it. A future that the communication thread sets asks
that who calls, and lets it watch callbacks. Writes only itself.

``concurrent.futures.Future`` guards its state with a lock that Python code takes. A
KeyboardInterrupt may arrive after the lock is taken and before Python notes it. Then nobody
releases the lock, and the thread that sets the result waits for ever (Python 3.11: in 76 of 20,000
interrupted calls of ``result()``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Generic, Protocol, TypeVar, cast

from commrt.errors import UsageError
from commrt.threads.deadline import clock
from commrt.threads.refusals import ON_COMM_THREAD
from commrt.threads.streams import DONE, HOST, StreamEvent, Streams

_log = logging.getLogger("commrt")

SLICE_S = 1.0
"""Longest sleep: CPython may notice a Ctrl-C just before it only when the thread wakes up."""

T = TypeVar("T")


class _Setter(Protocol):
    """The communication thread, as a future of one of its tasks knows it."""

    @property
    def is_current(self) -> bool: ...

    def watch(self) -> None: ...


class Future(Generic[T]):
    """A value or an error that one thread sets once and others wait for; setting never waits.

    On a GPU it may be set while work is still queued. `result` then lets the current stream of its
    caller wait for that work; the calling thread does not wait.

    All methods but those that set are for any thread.
    """

    def __init__(self, setter: _Setter | None = None) -> None:
        self.setter = setter
        """The communication thread, if it sets the result. Never changes."""
        # written by the thread that sets the result, `_is_done` last, and read when that is True
        self._value: T | None = None
        self._error: BaseException | None = None
        self._streams = HOST
        self._end = DONE
        self._is_done = False
        # any thread adds to them, and the one that sets or finds the result takes them out
        self._callbacks: list[Callable[[Future[T]], None]] = []
        self._lock = threading.Lock()  # acquired and released in C; held until the result is set
        self._lock.acquire()

    def done(self) -> bool:
        """Return True if the result is set."""
        return self._is_done

    def is_completed(self) -> bool:
        """Return True if the result is set and all work queued for it is done. Never waits."""
        return self._is_done and self._end.query()

    def set_result(self, value: T, streams: Streams = HOST, end: StreamEvent = DONE) -> None:
        """Set the result to `value`, which is there once `end` is reached on `streams`."""
        self._value = value
        self._streams = streams
        self._end = end
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        """Set the result to `error`, which `result` raises."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._is_done = True
        self._lock.release()
        if self._callbacks:
            if self.setter is not None:
                self.setter.watch()
            self._run_callbacks()

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` once: on the thread that sets the result, or now if it is set.

        In the order in which they were added. Log its errors.
        """
        self._callbacks.append(callback)
        if self._is_done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            # two threads may get here: one pops the last callback, the other finds none
            with suppress(IndexError):
                callback = self._callbacks.pop(0)
                try:
                    callback(self)
                except Exception:
                    _log.exception("commrt: a callback of a future failed")

    def drop_callbacks(self) -> None:
        """Forget all callbacks: a forked child must not run those of its parent."""
        self._callbacks.clear()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait; return or raise the result; `TimeoutError`, `UsageError` on the setter's thread."""
        if not self._is_done:
            self._wait(timeout_s)
        if self._error is not None:
            raise self._error
        if self._end is not DONE:
            self._streams.wait_event(self._end)
        return cast("T", self._value)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the result, and return it if it is an error, else None; see `result`."""
        if not self._is_done:
            self._wait(timeout_s)
        return self._error

    def _wait(self, timeout_s: float | None) -> None:
        if self.setter is not None and self.setter.is_current:
            raise UsageError(ON_COMM_THREAD)
        end_s = inf if timeout_s is None else clock.now_s() + timeout_s
        while not self._lock.acquire(
            timeout=max(min(SLICE_S, clock.slice_s, end_s - clock.now_s()), 0.0)
        ):
            if self._is_done:  # a Ctrl-C ended another wait just as it had the lock
                return
            if clock.now_s() >= end_s:
                raise TimeoutError(f"no result within {timeout_s:g} s")
        self._lock.release()  # for other threads that wait
