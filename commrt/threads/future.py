# SPDX-License-Identifier: Apache-2.0
"""Futures that Ctrl-C cannot break, and the streams of a GPU, whose work a future may stand for.

``concurrent.futures.Future`` guards its state with a lock that Python code takes. A KeyboardInterrupt may arrive after
the lock is taken and before Python notes it. Then nobody releases the lock, and the thread that sets the result waits
for ever (Python 3.11: in 76 of 20,000 interrupted calls of ``result()``).

On a GPU a call returns once its work is queued on the calling thread's current stream. On a CPU work is done when its
call returns, so streams and events do nothing there.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from commrt.errors import TransportClosed, UsageError
from commrt.threads.deadline import Deadline, clock
from commrt.threads.starting import start_thread

_log = logging.getLogger("commrt")

SLICE_S = 1.0
"""CPython may notice a Ctrl-C that arrives just before a thread falls asleep only when it wakes up: sleep no longer."""
ON_COMM_THREAD = (
    "a callback of a future runs on the thread that communicates, so it can neither wait for a transfer that comes "
    "later, nor close the world, nor use one that survives lost ranks: do that where the future's transfer was begun"
)

T = TypeVar("T")


class StreamEvent:
    """A place in a stream. This class is a CPU's, always reached; a GPU's is a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return True if all work before the event is done. Never waits."""
        return True

    def synchronize(self) -> None:
        """Wait on the host until all work before the event is done."""


DONE = StreamEvent()


class Streams:
    """The streams of one device, as the calling thread uses them. This class is a CPU's, which queues nothing."""

    queues = False
    """True if a call returns before its work is done."""

    def use(self) -> None:
        """Make the device the thread's current one."""

    def enter(self) -> None:
        """`use` the device, and make two streams for this thread: a current one, and one for `side_stream`."""

    def current(self) -> int:
        """Return the handle of the thread's current stream, as C libraries take it; 0 is the default stream."""
        return 0

    def record_event(self) -> StreamEvent:
        """Return the event at the end of what is queued on the thread's current stream now."""
        return DONE

    def wait_event(self, event: StreamEvent) -> None:
        """Let all work that the thread queues from now on begin after `event`. The thread itself does not wait."""

    def main_stream(self) -> AbstractContextManager[object]:
        """Make the first stream current in the body; for a thread that called `enter`."""
        return nullcontext()

    def side_stream(self) -> AbstractContextManager[object]:
        """Make the second stream current in the body; for a thread that called `enter`."""
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return a graph of what `work` queues, without doing it; None on a CPU.

        `work` only queues: it must not allocate or wait. Meanwhile no other thread may use the device's random numbers,
        since torch would take its call for a part of the graph.
        """
        return None


HOST = Streams()


class CudaStreams(Streams):
    """The streams of one GPU. They have a high priority: their blocks run first where there is no room for all."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.Stream | None = None
        self._second: torch.cuda.Stream | None = None
        self._seen: dict[int, torch.cuda.Stream] = {}  # by handle: making the object takes longer than using it

    def use(self) -> None:
        torch.cuda.set_device(self._device)

    def enter(self) -> None:
        self.use()
        self._first, self._second = (torch.cuda.Stream(self._device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._first)

    def current(self) -> int:
        # ``torch.cuda.current_stream`` would make an object for each call; Triton calls this function as well.
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # noqa: SLF001
        return handle

    def record_event(self) -> StreamEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._current())
        return cast("StreamEvent", event)

    def wait_event(self, event: StreamEvent) -> None:
        if event is not DONE:
            self._current().wait_event(cast("torch.cuda.Event", event))

    def _current(self) -> torch.cuda.Stream:
        handle = self.current()
        if handle not in self._seen:
            self._seen[handle] = torch.cuda.current_stream(self._device)
        return self._seen[handle]

    def main_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._first)

    def side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._second)

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Capture a CUDA graph. Other threads may allocate meanwhile."""
        graph, pool, collects = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), gc.isenabled()
        gc.disable()  # what the garbage collector frees would end the capture (triton#10712)
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    self._end(graph, pool)
                raise
            self._end(graph, pool)
        finally:
            if collects:
                gc.enable()
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._leave_capture(pool)
            raise

    def _leave_capture(self, pool: Any) -> None:
        """Bring torch out of a capture that CUDA ended: its allocator, and the device's random number generator."""
        for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # noqa: SLF001
            with suppress(RuntimeError):  # it was done already
                leave(self._device.index, pool)
        another = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            another.capture_begin(capture_error_mode="thread_local")
            another.capture_end()


def streams_of(device: torch.device) -> Streams:
    """Return the streams of `device`, which must have an index if it is a GPU."""
    return CudaStreams(device) if device.type == "cuda" else HOST


class _Setter(Protocol):
    """The communication thread, as a future of one of its tasks knows it."""

    newest: Future[Any] | None

    @property
    def is_current(self) -> bool: ...

    def run(self, task: Callable[[], None]) -> Future[None]: ...

    def watch(self) -> None: ...


class Future(Generic[T]):
    """A value or an error that one thread sets once and other threads wait for. Setting it never waits.

    On a GPU it may be set while work is still queued. `result` then lets the current stream of its caller wait for that
    work; the calling thread does not wait.
    """

    def __init__(self, setter: _Setter | None = None) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._setter = setter
        self._streams, self._end = HOST, DONE
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
        self._value, self._streams, self._end = value, streams, end
        self._finish()

    def set_exception(self, error: BaseException) -> None:
        """Set the result to `error`, which `result` raises."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._is_done = True
        self._lock.release()
        if self._callbacks:
            if self._setter is not None:
                self._setter.watch()
            self._run_callbacks()

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` once: on the thread that sets the result, or now if it is set. Log its errors."""
        self._callbacks.append(callback)
        if self._is_done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            with suppress(IndexError):  # two threads may get here: one pops the last callback, the other finds none
                callback = self._callbacks.pop()
                try:
                    callback(self)
                except Exception:
                    _log.exception("commrt: a callback of a future failed")

    def drop_callbacks(self) -> None:
        """Forget all callbacks: a forked child must not run those of its parent."""
        self._callbacks.clear()

    def after_all(self) -> Future[Any]:
        """Return a future that is done when this one is, and all tasks that were submitted until now.

        Its callbacks have the same place in the order of tasks on all ranks: those of a rank whose task is done already
        run after the tasks that this rank has submitted since, so the others must not run earlier.
        """
        if self._setter is None or self._setter.newest is self:
            return self
        with suppress(TransportClosed):
            return self._setter.run(lambda: None)
        return self

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result; return or raise it, `TimeoutError`, or `UsageError` on the thread that would set it."""
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
        if self._setter is not None and self._setter.is_current:
            raise UsageError(ON_COMM_THREAD)
        end_s = inf if timeout_s is None else clock.now_s() + timeout_s
        while not self._lock.acquire(timeout=max(min(SLICE_S, clock.slice_s, end_s - clock.now_s()), 0.0)):
            if clock.now_s() >= end_s:
                raise TimeoutError(f"no result within {timeout_s:g} s")
        self._lock.release()  # for other threads that wait


_idle: list[SimpleQueue[tuple[Callable[[], Any], Future[Any]]]] = []
"""Where threads of `start_call` take their next call from; a forked child has none of these threads."""
_running = set[Future[Any]]()
"""The results of calls that run now."""
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_running.clear)


def start_call(call: Callable[[], T]) -> Future[T]:
    """Start `call` on a thread that no other call uses, and return the future of its result."""
    future: Future[T] = Future()
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        start_thread(_work, "commrt-store-call", calls)
    _running.add(future)
    calls.put((call, future))
    return future


def outwait_calls(limit_s: float) -> None:
    """Wait up to `limit_s` for the calls that run, though perhaps nobody needs their results any more."""
    deadline = Deadline(limit_s)
    for future in [*_running]:
        with suppress(TimeoutError):
            future.exception(max(deadline.left_s, 0.0))


def _work(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        _run(*calls.get())  # a function of its own, as an idle thread must keep nothing alive
        _idle.append(calls)


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        _running.discard(future)
