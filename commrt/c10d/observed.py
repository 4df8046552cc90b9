# SPDX-License-Identifier: Apache-2.0
"""What torch's profiler and dispatch modes see of a collective on the thread that calls.

The ranges of the communication thread come from `commrt.runtime.recording`. Without a profiler nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

__all__ = ["observable"]

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

            def call() -> R:
                with _RecordFunctionFast(f"commrt::{name}", _inputs(given)):
                    return method(*args, **options)

            return cast("R", cast("Any", group).observed(torch_name or method.__name__, given, call))

        return begin

    return decorated


def _inputs(given: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a call reads: by c10d's order the second argument, or the first if that has none."""
    found = [_tensors(each) for each in given[:2]]
    return (found[1:] and found[1]) or found[0] if found else []


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for each in given for one in _tensors(each)] if isinstance(given, list | tuple) else []
