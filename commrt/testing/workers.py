# SPDX-License-Identifier: Apache-2.0
"""Run a function once per rank in local workers, forked from this process, for programs that a user waits for.

The parent holds their store, and waits for them. It imports and reads once, before it forks, what takes seconds. It
must not have threads then, and torch must not compute with several: a forked process lacks them and would wait for
them forever. No worker outlives the parent.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch.distributed import Store

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.store.launcher import LOOPBACK, Launch, announce
from commrt.store.rendezvous import hold, listen

__all__ = ["run_workers"]

T = TypeVar("T")

BAD_INPUT = {kind.__name__: kind for kind in (UsageError, ScheduleError, DisagreementError)}
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the parent, besides Ctrl-C."""
CAUSE_S = 0.5
"""How long to look for a dead worker after another one failed: the death may be the cause."""
EXIT_S = 5.0
"""How long a worker may take to exit after it sent its result."""
PR_SET_PDEATHSIG = 1


class _Worker(NamedTuple):
    rank: int
    process: BaseProcess
    result: Connection
    """Receives one message: (None, the value) or (name of the error, its text)."""


def run_workers(workers: int, body: Callable[[], T], may_lose: int = 0, limit_s: float | None = None) -> dict[int, T]:
    """Call `body` in `workers` processes, with torchrun's variables set; return the results by rank.

    Up to `may_lose` workers may be killed; they are missing in the result. Call it from the main thread.

    Raises `CommrtError` for the first failure, of the worker's type if that is invalid input; also if workers still
    run after `limit_s`. A signal that ends this process raises `KeyboardInterrupt` with that signal.
    """
    processes: list[_Worker] = []
    store: Store | None = None
    try:
        with _ending_signals_raise(), listen() as listener:
            with _signals_blocked():
                processes.extend(_fork(rank, workers, listener, body) for rank in range(workers))
            store = hold(listener)  # starts threads, so it comes after the forks; workers that connect earlier wait
            return _Watch(processes, may_lose).results(limit_s)
    finally:
        for worker in processes:
            worker.process.kill()  # also ends stopped processes
        for worker in processes:
            worker.process.join()
            worker.process.close()
            worker.result.close()
        del store  # the traceback of an error would keep it alive


@contextmanager
def _ending_signals_raise() -> Iterator[None]:
    """Let SIGTERM and the like raise `KeyboardInterrupt`, unless they are ignored (nohup)."""
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay signals until all workers are forked; freeze the heap, so workers do not finalise the parent's objects."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(rank: int, workers: int, listener: socket.socket, body: Callable[[], object]) -> _Worker:
    context = get_context("fork")
    try:
        result, sends = context.Pipe(duplex=False)
        given = rank, workers, listener, body, sends, os.getpid()
        process = context.Process(target=_work, args=given, daemon=True)
        process.start()
    except OSError as error:
        what = f"worker {rank} of {workers} could not be started: {error}: ask for fewer, or raise the limit (ulimit)"
        raise CommrtError(what) from error
    sends.close()
    return _Worker(rank, process, result)


def _work(
    rank: int, workers: int, listener: socket.socket, body: Callable[[], object], result: Connection, parent: int
) -> None:
    """Run in the worker. The parent alone handles Ctrl-C, which reaches all processes of a terminal."""
    if sys.platform == "linux":  # the kernel kills this process when its parent ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in ENDING:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    port = listener.getsockname()[1]
    listener.close()  # otherwise connections to a dead store would wait for this process
    announce(Launch("torchrun", rank, workers, rank, workers, LOOPBACK, port, store_exists=True))
    try:
        result.send((None, body()))
    except Exception as error:  # reported to the parent
        result.send((type(error).__name__, str(error)))


class _Watch:
    """Collects how all workers end."""

    def __init__(self, workers: Sequence[_Worker], may_lose: int) -> None:
        self._workers, self._may_lose = workers, may_lose
        self._values: dict[int, Any] = {}
        self._deaths: dict[int, str] = {}  # by rank, the signal's name
        self._failures: list[tuple[int, str, str]] = []  # rank, name of the error, text

    def results(self, limit_s: float | None) -> dict[int, Any]:
        """Return the results by rank; raises as soon as the run has failed, or after `limit_s`."""
        running = {worker.result: worker for worker in self._workers}
        deadline = None if limit_s is None else monotonic() + limit_s
        while running and len(self._deaths) <= self._may_lose:
            left_s = None if deadline is None else max(deadline - monotonic(), 0.0)
            ready = wait([*running], CAUSE_S if self._failures else left_s)
            if not ready and self._failures:
                break
            if not ready:
                silent = sorted(worker.rank for worker in running.values())
                raise CommrtError(f"workers {silent} still ran after {limit_s:g} s, and were killed")
            for pipe in ready:
                self._note(running.pop(pipe))  # type: ignore[call-overload]  # wait returns what it got
        if error := self._error():
            raise error
        for worker in self._workers:
            worker.process.join(EXIT_S)
        return self._values

    def _note(self, worker: _Worker) -> None:
        """Record how `worker` ended."""
        try:
            kind, content = worker.result.recv()
        except (EOFError, OSError):  # it ended without a message
            worker.process.join(EXIT_S)
            code = worker.process.exitcode
            if code is not None and code < 0:
                names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
                self._deaths[worker.rank] = names.get(-code, f"signal {-code}")
                return
            kind, content = "silence", f"it ended with exit code {code} and sent no result"
        if kind is None:
            self._values[worker.rank] = content
        else:
            self._failures.append((worker.rank, kind, content))

    def _error(self) -> CommrtError | None:
        """Return what went wrong. A death comes first: it may have caused the failures."""
        deaths = ", ".join(f"worker {rank} was killed by {name}" for rank, name in self._deaths.items())
        if len(self._deaths) > self._may_lose:
            spare = f"can do without {self._may_lose}" if self._may_lose else "needs all"
            workers = f"{spare} of its {len(self._workers)} workers"
            return CommrtError(f"{deaths}: this run {workers}; if you did not kill it, check whether memory ran out")
        if not self._failures:
            return None
        rank, kind, text = self._failures[0]
        before = f" (before that, {deaths})" if deaths else ""
        return BAD_INPUT.get(kind, CommrtError)(f"worker {rank} failed: {kind}: {text}{before}")
