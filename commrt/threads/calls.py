# SPDX-License-Identifier: Apache-2.0
"""Calls that may wait, such as for a store, each on a thread that no other call uses meanwhile.

Any thread may start calls: what is kept here changes by single operations of lists and sets only.

Not ``concurrent.futures``: the interpreter waits at its end for the threads of an executor, and
some of these calls wait for a store that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from commrt.threads.deadline import Deadline
from commrt.threads.future import Future
from commrt.threads.starting import start_thread

T = TypeVar("T")

_idle: list[SimpleQueue[tuple[Callable[[], Any], Future[Any]]]] = []
"""Where threads of `start_call` take their next call from; a forked child has no such thread."""
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
    """Wait up to `limit_s` for the calls that run, though perhaps nobody needs their results."""
    deadline = Deadline(limit_s)
    for future in [*_running]:
        with suppress(TimeoutError):
            future.exception(max(deadline.left_s, 0.0))


def _work(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        _run(*calls.get())  # a function of its own, as an idle thread must keep nothing alive
        _idle.append(calls)  # this thread offers itself to the next call


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
    finally:
        _running.discard(future)
