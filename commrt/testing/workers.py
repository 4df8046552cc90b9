# SPDX-License-Identifier: Apache-2.0
"""Run a function in forked workers of this process, for programs that a user waits for.

This process imports and reads once, before it forks, what takes seconds. It must not have threads
then, and torch must not compute with several: a forked process lacks them and would wait for them
forever. No worker outlives its parent. Until `run_workers` returns, signals that end this process
have its handler; while it forks, they are blocked, and the garbage collector's heap is frozen.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from multiprocessing import get_context
from typing import Any, NamedTuple, NoReturn, TypeVar

from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.store.rendezvous import listen
from commrt.testing.processes import EXIT_S, Crew

BAD_INPUT = {kind.__name__: kind for kind in (UsageError, ScheduleError, DisagreementError)}
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the parent of workers, besides Ctrl-C."""
SIGNALS = {number.value: number.name for number in signal.Signals}
"""By number. Real-time signals have no names."""
CAUSE_S = 0.5
"""How long to look for a dead worker after another one failed: the death may be the cause."""
PR_SET_PDEATHSIG = 1

T = TypeVar("T")


class _Result(NamedTuple):
    """What a worker sends at its end, the `Outcome.value` of all that were not killed."""

    value: Any = None
    error: str = ""
    """The name of its exception and the text; "" if it raised none."""


def run_workers(
    workers: int, body: Callable[[], T], may_lose: int = 0, limit_s: float | None = None
) -> dict[int, T]:
    """Call `body` in `workers` forked processes with torchrun's variables; return results by rank.

    Up to `may_lose` workers may be killed; they are missing in the result. Call it from the main
    thread.

    Raises `CommrtError` for the first failure, of the worker's type if that is invalid input; also
    if workers still run after `limit_s`. A signal that ends this process raises `KeyboardInterrupt`
    with that signal.
    """
    listener = listen()
    crew = Crew(workers, _work, (body, listener, os.getpid()), get_context("fork"), listener, inf)
    try:
        with _started(crew):
            crew.listen(
                inf if limit_s is None else limit_s, patience_s=lambda: _patience_s(crew, may_lose)
            )
        if error := _failure(crew, may_lose):
            raise error
        if silent := sorted(rank for rank in crew.running if crew.outcomes[rank].value is None):
            raise CommrtError(f"workers {silent} still ran after {limit_s:g} s, and were killed")
    finally:
        crew.close()
    return {outcome.rank: outcome.value.value for outcome in crew.outcomes if outcome.value}


def _work(_: object, body: Callable[[], object], listener: socket.socket, parent: int) -> _Result:
    """Run `body` in a worker.

    The parent alone handles Ctrl-C, which reaches all processes of a terminal.
    """
    # the kernel kills this process when its parent ends
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    listener.close()  # otherwise connections to a dead store would wait for this process
    try:
        return _Result(body())
    except Exception as error:  # reported to the parent
        return _Result(error=f"{type(error).__name__}: {error}")


def _losses(crew: Crew) -> tuple[list[str], list[tuple[int, str]]]:
    """Return which workers were killed, and ranks and errors of those that failed, in order."""
    dead = list[str]()
    failed = list[tuple[int, str]]()
    for each in crew.ended:
        code = each.exit_code or 0
        if each.value is None and code < 0:
            dead.append(f"worker {each.rank} was killed by {SIGNALS.get(-code, f'signal {-code}')}")
            continue
        silence = f"silence: it ended with exit code {code} and sent no result"
        error = (each.error or silence) if each.value is None else each.value.error
        if error:
            failed.append((each.rank, error))
    return dead, failed


def _patience_s(crew: Crew, may_lose: int) -> float:
    """Return for how long to wait for the workers' next message."""
    dead, failed = _losses(crew)
    if len(dead) > may_lose:
        return 0.0
    if failed:
        return CAUSE_S
    return EXIT_S if len(crew.ended) == len(crew.outcomes) else inf


def _failure(crew: Crew, may_lose: int) -> CommrtError | None:
    """Return what went wrong with workers; first a death, which may have caused the failures."""
    dead, failed = _losses(crew)
    deaths = ", ".join(dead)
    if len(dead) > may_lose:
        spare = f"can do without {may_lose}" if may_lose else "needs all"
        needs = f"this run {spare} of its {len(crew.outcomes)} workers"
        return CommrtError(
            f"{deaths}: {needs}; if you did not kill it, check whether memory ran out"
        )
    if not failed:
        return None
    rank, error = failed[0]
    before = f" (before that, {deaths})" if deaths else ""
    kind = BAD_INPUT.get(error.partition(":")[0], CommrtError)
    return kind(f"worker {rank} failed: {error}{before}")


@contextmanager
def _started(crew: Crew) -> Iterator[None]:
    """Start the workers; then SIGTERM and others raise `KeyboardInterrupt`, if not ignored (nohup).

    Signals wait until all workers are forked. The heap is frozen meanwhile: workers finalise none
    of its objects.
    """
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
    gc.freeze()
    try:
        try:
            crew.start()
            for number in ours:  # which no worker inherits
                signal.signal(number, _interrupt)
        finally:
            gc.unfreeze()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number))
