# SPDX-License-Identifier: Apache-2.0
"""The communication thread: all communication of a world, as tasks in the order of submission.

A task may also run on the thread that asks for it, while no other is pending: see `CommThread`.
This module knows nothing of ranks: what a task does is its own, and a world is told by
`on_failure`. It writes its own fields, and turns the recording of gradients off while a task runs.
It also keeps the recorder of a world, for `commrt.threads.recording`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from math import inf
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from commrt.errors import TransportClosed, UsageError
from commrt.threads.callback_watch import watch_callbacks
from commrt.threads.future import Future
from commrt.threads.recording import NOTHING, TORCH, Fact, Recorder, within_range
from commrt.threads.refusals import (
    CLOSED,
    IN_A_CALL,
    INHERITED,
    ON_COMM_THREAD,
    refusal_after,
)
from commrt.threads.starting import start_thread
from commrt.threads.streams import DONE, HOST, StreamEvent

EXIT_S = 5.0
"""How long a process that ends waits for tasks that were told to end.

A Ctrl-C may have left one stuck: Python 3.11 can keep the lock of an import that it interrupts.
"""

T = TypeVar("T")


class RecoveredError(Exception):
    """Raised by a task to fail with `error` and let the thread go on with the next task."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CommThread:
    """Runs tasks in order, until one of them fails; then it refuses all later ones.

    The ranks of a world run the same tasks in the same order. After a failure this rank is out of
    step with its peers, so the next task could only exchange wrong bytes. The thread is a daemon:
    it does not keep the process alive. The first `submit` starts it.

    One task runs at a time, on the thread that has its turn; so do the callbacks of its future that
    are there when it ends, before the next task::

                          where the task runs                        its result, or error
        submit            on the communication thread                in the future
        ... in callbacks  there too, before it returns               in the future
        run               on the caller's thread, if no other is     in the future
                          pending; else as `submit`
        call              as `run`                                   returned, or raised

    An error, but for a `RecoveredError`, becomes the `failure`; `on_failure` hears of it on that
    thread. What callbacks submit has the same place in the order on all ranks. A callback that
    takes longer than `limit_s`, not counting that, ends the world: it may wait for a later task.

    Any thread may call what does not say otherwise. Who writes what::

        streams                 others: a task that connects a GPU (`commrt.runtime.gpu_connection`)
        recorder                others: `World.recorder`, on any thread
        newest                  threads that ask for a task
        _is_started             they too, and `close` if there is no thread
        failure                 the first to fail, watch in vain or give up, by `_note_failure`
        _pending                threads that submit add; who ends a task takes it out
        _runner, _in_callbacks  the thread that has its turn, or had it just now
        _turn                   the thread that watches callbacks (`_abandon`), and a forked child
        _is_over                the communication thread as it ends, `close` if there is none, and
                                the thread that watches callbacks
        _thread, _is_watched    the communication thread
        _refusal                `close`, and a forked child, which has no such thread
    """

    def __init__(
        self,
        on_failure: Callable[[BaseException], None],
        name: str = "commrt",
        limit_s: Callable[[], float] = lambda: inf,
    ) -> None:
        self.streams = HOST
        """The streams on which tasks queue work."""
        self.recorder: Recorder | None = None
        """Receives ranges of time of the tasks, and of who waits for them."""
        self.newest: Future[Any] | None = None
        """The newest task but those of callbacks; None after `call`."""
        self.failure: BaseException | None = None
        """The first error of a task, or the reason given to `give_up`; it stays."""
        self._first_failure: dict[str, BaseException] = {}  # the same: see `_note_failure`
        self._on_failure = on_failure
        self._limit_s = limit_s
        self._name = name
        # None, but while callbacks run: then another object each time that they begin, or go on
        # after a task
        self._in_callbacks: object | None = None
        self._is_watched = False
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any], StreamEvent] | None] = (
            SimpleQueue()
        )
        self._pending: set[Future[Any]] = set()  # submitted tasks that have not ended
        self._refusal: str | None = None  # why nothing is accepted any more
        self._is_over = False  # no task will begin any more
        # held by the thread that has its turn. Another lock takes its place where that thread may
        # never return (`_abandon`) or is not here (`leave_to_parent`). If it does return, it
        # releases the old one, and no later task begins: `failure` or `_refusal` forbids that.
        self._turn = threading.Lock()
        # the thread in `run` or `call`, while it has its turn
        self._runner: threading.Thread | None = None
        # after a Ctrl-C in it, Thread.join takes a thread for ended (3.11)
        self._ended: Future[None] = Future()
        self._thread: threading.Thread | None = None  # the communication thread
        self._is_started = False  # True also if `close` has found no thread
        self._starting = threading.RLock()  # which a signal handler can take amid `submit`
        # held for good by the first thread that was started, or by `close` before it
        self._claim = threading.Lock()

    @property
    def listener(self) -> Recorder | None:
        """What receives ranges now: `recorder`, or if None a profiler of torch while one runs."""
        return TORCH if self.recorder is None and profiler._is_profiler_enabled else self.recorder  # noqa: SLF001  # nothing else tells all threads

    def within_range(self, name: str, **facts: Fact) -> AbstractContextManager[None]:
        """Record the body as a range of time, on any thread; 0.4 us if nothing listens."""
        listener = self.listener
        return NOTHING if listener is None else within_range(listener, name, **facts)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` after all earlier ones, and on a GPU after all that the caller has queued.

        In a callback of a future it has run when this returns. Raises `TransportClosed` as
        `require_open` does, and `TransportError` if the system allows no thread.
        """
        if self._in_callbacks is not None and self.is_current:
            return self._run_nested(task)
        self.require_open()
        if not self._is_started:
            self._start()
        future: Future[T] = Future(self)
        self.newest = future
        before = self.streams.record_event()
        self._pending.add(future)
        self._tasks.put((task, future, before))
        if self._is_over:  # another thread, or a signal handler, has closed it since `require_open`
            self._refuse(future)
        return future

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` now, on the calling thread, if no other is pending; otherwise `submit` it.

        It saves two changes of thread, which take longer than a short message. A KeyboardInterrupt
        ends the task. On a GPU the task must only queue work: a wait inside CUDA or NCCL cannot be
        interrupted.
        """
        if self._pending or self._turn.locked():
            return self.submit(task)
        self.require_open()
        future: Future[T] = Future()
        self.newest = future
        before = self.streams.record_event()
        # which Ctrl-C cannot leave taken, as it can an acquire()
        with self.streams.main_stream(), self._turn:
            self._runner = threading.current_thread()
            try:
                self._run(task, future, before)
            finally:
                self._runner = self._in_callbacks = None
        return future

    def call(self, task: Callable[[], T]) -> T:
        """Return or raise what ``run(task).result()`` would; costs 2 us in place of 5."""
        if self._pending or self._turn.locked() or self.streams.queues:
            return self.run(task).result()
        self.require_open()
        self.newest = None
        with self._turn:
            self._runner = threading.current_thread()
            try:
                return self._attempt(task)
            except RecoveredError as recovered:
                raise recovered.error from None
            except BaseException as failure:
                self._fail(failure)
                raise
            finally:
                self._runner = None

    def _run_nested(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` in a callback of an earlier one, also while `close` waits for that."""
        future: Future[T] = Future(self)
        before = self.streams.record_event()
        with self.streams.main_stream():  # torch runs callbacks on other streams
            self._run(task, future, before)
        return future

    def _start(self) -> None:
        with self._starting:
            if not self._is_started:
                start_thread(self._begin, self._name)
                self._is_started = True

    def _begin(self) -> None:
        """Work, if this is the first thread: a signal handler amid `_start` may start another."""
        if self._claim.acquire(blocking=False):
            self._thread = threading.current_thread()
            self._work()

    @property
    def is_current(self) -> bool:
        """True on the communication thread."""
        return threading.current_thread() is self._thread

    def require_open(self) -> None:
        """Raise `UsageError` in a task that runs on this caller, `TransportClosed` if none may."""
        if self._runner is threading.current_thread():
            raise UsageError(IN_A_CALL)
        if self._refusal is not None:
            raise TransportClosed(self._refusal)

    def require_other_thread(self) -> None:
        """Raise `UsageError` on the communication thread, and in a task that runs on this caller.

        Neither can wait: a signal handler may have interrupted the task, or the task itself asks.
        """
        if self.is_current:
            raise UsageError(ON_COMM_THREAD)
        if self._runner is threading.current_thread():
            raise UsageError(IN_A_CALL)

    def require_working(self, *, in_callback: bool = True) -> None:
        """Raise what submitting would: see `require_other_thread`, `require_open`, `failure`."""
        if not (in_callback and self._in_callbacks is not None and self.is_current):
            self.require_other_thread()
            self.require_open()
        if self.failure is not None:
            raise refusal_after(self.failure) from self.failure

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._is_over:  # `_abandon` has ended it: its future has an error already
                return
            with self._turn:
                self._run(*task)
            self._in_callbacks = None
            del task  # or it stays alive until the next one comes
        self._end()

    def _end(self) -> None:
        """Fail all tasks that have not run, and those that come later."""
        # set before `_pending` is read: `submit` adds its future first, and reads this after
        self._is_over = True
        for future in tuple(self._pending):
            self._refuse(future)
        if not self._ended.done():
            self._ended.set_result(None)

    def _refuse(self, future: Future[Any]) -> None:
        """Fail a task that came too late to run, unless another thread has done so."""
        with suppress(KeyError):
            self._pending.remove(future)
            if not future.done():  # a callback of it may never return
                failure = self.failure
                future.set_exception(
                    TransportClosed(CLOSED) if failure is None else refusal_after(failure)
                )

    def _run(self, task: Callable[[], T], future: Future[T], before: StreamEvent) -> None:
        self._in_callbacks = None
        error: BaseException | None = None
        try:
            if before is not DONE:
                self.streams.wait_event(before)
            value = self._attempt(task)
            end = self.streams.record_event()
        except RecoveredError as recovered:
            error = recovered.error
        except BaseException as failure:  # `result` raises it
            self._fail(failure)
            error = failure
        self._in_callbacks = object()
        if error is None:
            future.set_result(value, self.streams, end)
        else:
            future.set_exception(error)
        self._pending.discard(future)

    def _attempt(self, task: Callable[[], T]) -> T:
        if self.failure is not None:
            raise refusal_after(self.failure) from self.failure
        records = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # noqa: SLF001  # torch.no_grad() takes five times as long
            return task()
        finally:
            torch._C._set_grad_enabled(records)  # noqa: SLF001

    def _note_failure(self, failure: BaseException) -> bool:
        """Set `failure`, unless there is one; return True for the first, on whichever thread."""
        if self.failure is not None:
            return False
        # one operation, amid which no other thread and no signal handler comes
        self.failure = self._first_failure.setdefault("", failure)
        return self.failure is failure

    def _fail(self, failure: BaseException) -> None:
        if self._note_failure(failure):
            try:
                self._on_failure(failure)
            except BaseException as error:  # or no future would be set any more
                failure.add_note(
                    f"telling the other ranks failed as well: {type(error).__name__}: {error}"
                )

    def watch(self) -> None:
        """Bound the time that callbacks take from now on.

        On the communication thread; does nothing on others.
        """
        if not self._is_watched and self.is_current:
            self._is_watched = True
            start_thread(
                watch_callbacks,
                f"{self._name}-watch",
                self._callbacks_now,
                self._limit_s,
                self._ended,
                self._abandon,
            )

    def _callbacks_now(self) -> object | None:
        return self._in_callbacks

    def _abandon(self, failure: BaseException) -> None:
        """End the world while a callback keeps this thread; on the thread that watches it."""
        self._turn = threading.Lock()
        self._fail(failure)
        self._end()

    def give_up(self, reason: BaseException) -> bool:
        """Start no more tasks because of `reason`; on any thread, and in a signal handler.

        Return False if a task failed before, or the thread has ended. `on_failure` does not hear of
        it: whoever gives up tells the other ranks.
        """
        return not self._is_over and self._note_failure(reason)

    def close(self, limit_s: float | None = None) -> None:
        """Finish all tasks, within `limit_s` or raise `TimeoutError`, and accept no more.

        Safe to call twice.
        """
        self.require_other_thread()
        self._refusal = CLOSED
        self._tasks.put(None)
        with self._starting:
            # no thread works, nor will any
            if not self._is_started and self._claim.acquire(blocking=False):
                self._is_started = self._is_over = True
                self._ended.set_result(None)
        self._ended.result(limit_s)
        # another thread may `run` a task
        if not self._turn.acquire(timeout=-1 if limit_s is None else limit_s):
            raise TimeoutError(f"another thread has not finished a task within {limit_s:g} s")
        self._turn.release()

    def leave_to_parent(self) -> None:
        """Fail all tasks, pending or new: in a forked child the thread does not exist."""
        self._refusal = INHERITED
        # a thread that is not here may have held them
        self._turn = threading.Lock()
        self._starting = threading.RLock()
        for future in self._pending:
            future.drop_callbacks()
            if not future.done():
                future.set_exception(TransportClosed(INHERITED))
        if not self._ended.done():
            self._ended.set_result(None)


def after_all(future: Future[Any]) -> Future[Any]:
    """Return a future that is done when `future` and all tasks that its thread has taken are.

    Its callbacks have the same place in the order of tasks on all ranks: those of a rank whose task
    is done already run after the tasks that this rank has submitted since, so the others must not
    run earlier. May submit a task that does nothing.
    """
    thread = future.setter
    if not isinstance(thread, CommThread) or thread.newest is future:
        return future
    with suppress(TransportClosed):
        return thread.run(lambda: None)
    return future
