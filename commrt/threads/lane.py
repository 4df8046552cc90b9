# SPDX-License-Identifier: Apache-2.0
"""One thread that issues all communication of a world, in the order it was submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from commrt.errors import Evicted, TransportClosed, TransportError, UsageError
from commrt.threads.answer import Answer
from commrt.threads.streams import DONE, HostStreams, Mark, Streams

__all__ = ["Lane", "Result"]

CLOSED = "the world was closed, so nothing more can be sent: call init() for a new one"
ON_LANE = (
    "a callback of a future runs on the thread that communicates, at a moment that differs between ranks, so it can "
    "neither begin nor wait for a transfer nor close the world: do that where the first transfer was begun"
)
INHERITED = (
    "this world belongs to the process that opened it, and a forked child cannot use it: communicate in that process "
    "only, or start this one with multiprocessing's spawn or a launcher and call init() in it"
)

T = TypeVar("T")


class Result(Answer[T]):
    """A task's; on a GPU it may still be queued, and then the current stream of who takes it waits in their place."""

    def __init__(self, lane: threading.Thread | None = None) -> None:
        super().__init__()
        self._lane = lane
        self._streams: Streams = HostStreams()
        self._end = DONE

    def give_queued(self, value: T, streams: Streams, end: Mark) -> None:
        """Answer with `value`, which is there at the `end` of what is queued on `streams`."""
        self._streams, self._end = streams, end
        self.give(value)

    @property
    def is_done(self) -> bool:
        """True if there is an answer, and all that was queued for it is done; never waits."""
        return self._given and self._end.query()

    def result(self, timeout_s: float | None = None) -> T:
        """See `Answer.result`; raises `UsageError` on the thread that would have to give it."""
        if not self._given and threading.current_thread() is self._lane:
            raise UsageError(ON_LANE)
        value = super().result(timeout_s)
        self._streams.follow(self._end)
        return value


class Lane:
    """A worker thread with a memory: after the first failure everything later is refused.

    The ranks of a world run the same tasks in the same order; once one has failed here, the peers are no
    longer in step and running the next one could only exchange the wrong bytes. The thread does not keep the
    process from ending.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], name: str = "commrt") -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        self._refusal: str | None = None
        self._pending: set[Answer[Any]] = set()
        self._over = False
        self.streams: Streams = HostStreams()
        """Where tasks queue their work."""
        self._ended: Answer[None] = Answer()  # Thread.join takes a thread for ended once Ctrl-C interrupts it (3.11)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Result[T]:
        """Run `task` after all earlier ones, and behind what the caller has queued; ``result()`` raises its error.

        Raises `TransportClosed` after `close`, and in a forked child.
        """
        self.require_open()
        answer: Result[T] = Result(self._thread)
        before = self.streams.mark()
        self._pending.add(answer)
        self._tasks.put(lambda: self._run(task, answer, before))
        if self._over:  # closed since we asked, by another thread or a signal handler
            self._refuse(answer)
        return answer

    def require_open(self) -> None:
        """Raise `TransportClosed` if this lane takes no more."""
        if self._refusal is not None:
            raise TransportClosed(self._refusal)

    def require_elsewhere(self) -> None:
        """Raise `UsageError` on the lane's own thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise UsageError(ON_LANE)

    def require_unbroken(self) -> None:
        """Raise `TransportClosed` if a task would get no further than this, `UsageError` as `require_elsewhere`."""
        self.require_elsewhere()
        self.require_open()
        if self._failure is not None:
            raise _refusal_after(self._failure) from self._failure

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # or it stays alive until the next one comes
        self._over = True  # before the others are looked for: who submits adds an answer first, and looks at this then
        for answer in tuple(self._pending):
            self._refuse(answer)
        self._ended.give(None)

    def _refuse(self, answer: Answer[Any]) -> None:
        """Answer what came too late to be run, unless that was done."""
        with suppress(KeyError):
            self._pending.remove(answer)
            answer.fail(TransportClosed(CLOSED))

    def _run(self, task: Callable[[], T], answer: Result[T], before: Mark) -> None:
        try:
            self.streams.follow(before)
            value, end = self._attempt(task), self.streams.mark()
        except BaseException as failure:  # whoever waits for the answer raises it
            self._fail(failure)
            answer.fail(failure)
        else:
            answer.give_queued(value, self.streams, end)
        self._pending.discard(answer)

    def _attempt(self, task: Callable[[], T]) -> T:
        if self._failure is not None:
            raise _refusal_after(self._failure) from self._failure
        with torch.no_grad():
            return task()

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            try:
                self._on_failure(failure)
            except BaseException as error:  # or nobody would get an answer any more
                failure.add_note(f"telling the other ranks failed as well: {type(error).__name__}: {error}")

    def give_up(self, reason: BaseException) -> bool:
        """Start no task any more; True if that is news: the lane had neither failed nor ended."""
        is_news = self._failure is None and not self._over
        if is_news:
            self._failure = reason
        return is_news

    @property
    def failure(self) -> BaseException | None:
        """What broke the lane, or None."""
        return self._failure

    def close(self) -> None:
        """Finish what was submitted and take no more. Safe to call twice, also after Ctrl-C in the first call."""
        self.require_elsewhere()
        self._refusal = CLOSED
        self._tasks.put(None)
        self._ended.result()

    def leave_to_parent(self) -> None:
        """In a forked child, where the thread does not exist: take no more, and let nobody wait for an answer."""
        self._refusal = INHERITED
        for answer in self._pending:
            answer.drop_callbacks()
            if not answer.given:
                answer.fail(TransportClosed(INHERITED))
        if not self._ended.given:
            self._ended.give(None)


def _refusal_after(failure: BaseException) -> TransportError:
    """The error for everything that was to follow `failure`; carries its place."""
    if isinstance(failure, Evicted):
        return failure.again()
    if not isinstance(failure, TransportError):
        return TransportClosed(
            f"this world was given up: call init() for a new one. It was {_named(failure, str(failure))}"
        )
    refusal = TransportClosed(
        "an earlier transfer failed, so this one was not started: call init() for a new world. It was "
        + _named(failure, failure.what),
        failure.place,
    )
    refusal.elsewhere = failure.elsewhere
    return refusal


def _named(failure: BaseException, what: str) -> str:
    return ": ".join(filter(None, (type(failure).__name__, what)))
