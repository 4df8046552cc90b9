# SPDX-License-Identifier: Apache-2.0
"""Local workers: a process per rank, forked from this one, which holds their store and waits for them.

What they import and read takes seconds, so this process does it once, before. It may have no threads then, and must not
compute with several: they would be missing in the workers, where others wait for them. No worker outlives it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from torch.distributed import Store

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.membership.launcher import LOOPBACK, Launch, announce
from commrt.membership.rendezvous import hold, listen

__all__ = ["run_workers"]

T = TypeVar("T")

BAD_INPUT = {kind.__name__: kind for kind in (UsageError, ScheduleError, DisagreementError)}
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What ends this process; Ctrl-C does too."""
CAUSE_S = 0.5
"""How long to look for the death because of which another worker failed."""
EXIT_S = 5.0
"""How long a worker that has said its last word may take to end."""
PR_SET_PDEATHSIG = 1


class _Worker(NamedTuple):
    rank: int
    process: BaseProcess
    pipe: Connection
    """On which it says one thing: (None, what it returned), or (name of the error, text)."""
    word: Connection
    """On which it is told to begin."""


def run_workers(
    workers: int,
    body: Callable[[], T],
    may_lose: int = 0,
    successors: Mapping[int, float] = MappingProxyType({}),
    limit_s: float | None = None,
) -> dict[int, T]:
    """What `body` returned in each of so many processes, by rank; `may_lose` of them may be killed, and are left out.

    The place of each of the `successors` that is killed is taken by another process, so many seconds later. All find
    torchrun's variables set. Raises `CommrtError` for the first that failed, of the kind that it raised if that was bad
    input, or if all have not ended within `limit_s`, and `KeyboardInterrupt` for a signal that ends this process, with
    that signal; then all others are ended. For the main thread.
    """
    crew: list[_Worker] = []
    store: Store | None = None
    try:
        with _stoppable(), listen() as listener:
            with _forking():
                crew.extend(_begin(rank, workers, listener, body) for rank in [*range(workers), *successors])
            store = hold(listener)  # not before, as it has threads
            after_s = {worker: successors[worker.rank] for worker in crew[workers:]}
            return _Watch(crew[:workers], after_s, may_lose, limit_s).values()
    finally:
        for worker in crew:
            worker.process.kill()  # also one that is stopped
        for worker in crew:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
            worker.word.close()
        del store  # an error that is kept would keep it too


@contextmanager
def _stoppable() -> Iterator[None]:
    """Here SIGTERM and its like do what Ctrl-C does, unless they are ignored, as under nohup."""
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number))


@contextmanager
def _forking() -> Iterator[None]:
    """Signals come when all workers are known; and no worker may collect, and so end, what is this process's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(rank: int, workers: int, listener: socket.socket, body: Callable[[], object]) -> _Worker:
    context = get_context("fork")
    try:
        ours, theirs = context.Pipe(duplex=False)
        ear, word = context.Pipe(duplex=False)
        given = rank, workers, listener, body, ear, theirs, os.getpid()
        process = context.Process(target=_work, args=given, daemon=True)
        process.start()
    except OSError as error:
        what = f"worker {rank} of {workers} could not be started: {error}: ask for fewer, or raise the limit (ulimit)"
        raise CommrtError(what) from error
    theirs.close()
    ear.close()
    return _Worker(rank, process, ours, word)


def _work(  # all that a new process knows
    rank: int,
    workers: int,
    listener: socket.socket,
    body: Callable[[], object],
    ear: Connection,
    pipe: Connection,
    parent: int,
) -> None:
    """In the worker. Ctrl-C, which goes to all processes of a terminal, is its parent's business alone."""
    _end_with(parent)
    for number in ENDING:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    port = listener.getsockname()[1]
    listener.close()  # or calls to a store that is gone would be waiting for this process
    ear.recv()
    announce(Launch("torchrun", rank, workers, rank, workers, LOOPBACK, port, store_exists=True))
    try:
        pipe.send((None, body()))
    except Exception as error:  # it is told to the parent, whatever it is
        pipe.send((type(error).__name__, str(error)))


def _end_with(parent: int) -> None:
    """From now on the kernel kills this process when `parent` ends, however that ends; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Watch:
    """Over workers that are told to begin now, and those that take a dead one's place so many seconds after it died."""

    def __init__(
        self, crew: Sequence[_Worker], after_s: Mapping[_Worker, float], may_lose: int, limit_s: float | None = None
    ) -> None:
        self._size, self._may_lose = len(crew), may_lose
        self._limit_s = inf if limit_s is None else limit_s
        self._deadline = monotonic() + self._limit_s
        self._waiting = {worker.rank: (worker, seconds) for worker, seconds in after_s.items()}
        self._due: list[tuple[float, _Worker]] = []
        self._ends: _Ends[Any] = _Ends()
        self._died: dict[int, str] = {}  # by what signal, of those whose place was taken
        self._first, self._later = {worker.pipe: worker for worker in crew}, dict[Connection, _Worker]()
        for worker in crew:
            worker.word.send(None)

    def values(self) -> dict[int, Any]:
        """What each has returned; raises as soon as that cannot be had."""
        ends, crew = self._ends, [*self._first.values()]
        while (self._first or self._later) and len(ends.deaths) <= self._may_lose:
            ready = wait([*self._first, *self._later], self._patience_s())
            if monotonic() >= self._deadline and not ready and not ends.failures:
                raise self._unended()
            if not ready and (ends.failures or not self._first):
                break
            for pipe in ready:
                self._hear(pipe)  # type: ignore[arg-type]  # it returns what it was given
            self._begin_those_due()
        if len(ends.deaths) > self._may_lose:
            spare = f"can do without {self._may_lose}" if self._may_lose else "needs all"
            what = f"{ends.told()}: this run {spare} of its {self._size} workers; if nobody meant it, was memory short?"
            raise CommrtError(what)
        if ends.failures:
            raise ends.error()
        for worker in crew:
            worker.process.join(EXIT_S)
        return ends.values

    def _patience_s(self) -> float | None:
        if self._ends.failures:
            return CAUSE_S
        if not self._first:  # all others have ended
            return EXIT_S
        when = min([self._deadline, *(when for when, _ in self._due)])
        return None if when == inf else max(when - monotonic(), 0.0)

    def _unended(self) -> CommrtError:
        silent = sorted(worker.rank for worker in (*self._first.values(), *self._later.values()))
        return CommrtError(f"workers {silent} had not ended after {self._limit_s:g} s, and were killed")

    def _hear(self, pipe: Connection) -> None:
        worker = self._first.pop(pipe, None)
        if worker is None:
            self._hear_later(self._later.pop(pipe))
            return
        self._ends.note(worker)
        if worker.rank in self._ends.deaths and worker.rank in self._waiting:
            successor, seconds = self._waiting.pop(worker.rank)
            self._due.append((monotonic() + seconds, successor))

    def _hear_later(self, worker: _Worker) -> None:
        """Of one in a dead one's place: if it has failed, what the others have done without that one still stands."""
        self._ends.note(worker)
        if self._ends.failures and self._ends.failures[-1][0] == worker.rank:
            rank, kind, text = self._ends.failures.pop()
            self._ends.deaths[rank] = self._died[rank]
            print(
                f"commrt: worker {rank}, in the place of one that was killed, failed: {kind}: {text}", file=sys.stderr
            )

    def _begin_those_due(self) -> None:
        for when, worker in [due for due in self._due if due[0] <= monotonic()]:
            self._due.remove((when, worker))
            self._died[worker.rank] = self._ends.deaths.pop(worker.rank)
            self._later[worker.pipe] = worker
            worker.word.send(None)


class _Ends(Generic[T]):
    """How workers ended. A death is a cause, where an error may be what it led to."""

    def __init__(self) -> None:
        self.values: dict[int, T] = {}
        self.deaths: dict[int, str] = {}
        """By what signal."""
        self.failures: list[tuple[int, str, str]] = []
        """(rank, name of the error, text), in the order in which they were heard of."""

    def note(self, worker: _Worker) -> None:
        """Hear what `worker`, which has spoken or ended, has to say."""
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, OSError):
            self._note_silent(worker)
            return
        if kind is None:
            self.values[worker.rank] = content
        else:
            self.failures.append((worker.rank, kind, content))

    def _note_silent(self, worker: _Worker) -> None:
        worker.process.join(EXIT_S)
        code = worker.process.exitcode
        if code is not None and code < 0:
            self.deaths[worker.rank] = _named(-code)
        else:
            self.failures.append((worker.rank, "silence", f"it ended with exit code {code} and said nothing"))

    def told(self) -> str:
        """The deaths in words."""
        return ", ".join(f"worker {rank} was killed by {name}" for rank, name in self.deaths.items())

    def error(self) -> CommrtError:
        """The first failure; bad input stays bad input."""
        rank, kind, text = self.failures[0]
        before = f" (before that, {self.told()})" if self.deaths else ""
        return BAD_INPUT.get(kind, CommrtError)(f"worker {rank} failed: {kind}: {text}{before}")


def _named(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
