# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler shows of a collective: a range on the thread that calls, and ranges of what runs meanwhile.

Nothing is recorded, and hardly any time is spent, while there is no profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.futures import Future

from commrt.c10d.group_work import GroupWork

__all__ = ["observable", "recorded"]

P = ParamSpec("P")
R = TypeVar("R")

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001  # of the calling thread


def observable(name: str, torch_name: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a profiler and dispatch modes see the calls of a method. `torch_name` is c10d's, if the method has another.

    While there are such, the call goes to ``self.observed(torch_name, args, begin)``, of which ``begin()`` is the call.
    """

    def decorated(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def begin(*args: P.args, **options: P.kwargs) -> R:
            if not (profiler._is_profiler_enabled or _modes()):  # noqa: SLF001  # a flag of the process
                return method(*args, **options)
            group, *given = list(args) + list(options.values())
            call = _recorded_call(name, _inputs(given), lambda: method(*args, **options))
            return cast("R", cast("Any", group).observed(torch_name or method.__name__, given, call))

        return begin

    return decorated


def recorded(name: str, run: Callable[[], None]) -> Callable[[], None]:
    """Return `run`, recorded if the process is profiled; it shows if the thread that runs it is."""
    if not profiler._is_profiler_enabled:  # noqa: SLF001
        return run

    def recorded_run() -> None:
        with _RecordFunctionFast(f"commrt:{name} (running)"):
            run()

    return recorded_run


def _recorded_call(name: str, inputs: list[Tensor], begin: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        with _RecordFunctionFast(f"commrt:{name}", inputs):
            work = begin()
        if type(work) is GroupWork and not work.is_completed() and profiler._is_profiler_enabled:  # noqa: SLF001
            _record_until_done(f"commrt:{name} (under way)", work)
        return work

    return call


def _record_until_done(name: str, work: GroupWork) -> None:
    """Record a range that begins here and ends on the thread that completes `work`."""
    done: Future[None] = Future()
    with profiler.record_function(name) as started:
        started._call_end_callbacks_on_future(done)  # noqa: SLF001
    work.when_done(lambda: done.set_result(None))


def _inputs(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a call reads: by c10d's order the second argument, or the first if that has none."""
    found = [_tensors(each) for each in given[:2]]
    return (found[1:] and found[1]) or found[0] if found else []


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for each in given for one in _tensors(each)] if isinstance(given, list | tuple) else []
