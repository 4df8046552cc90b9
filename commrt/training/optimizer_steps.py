# SPDX-License-Identifier: Apache-2.0
"""The steps of all optimizers of this process: which are in flight, and calls before each of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import local
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["are_stepping", "before_each_step", "parameters_of", "wrapped_as"]


class _Thread(local):
    """What one thread runs."""

    def __init__(self) -> None:
        self.running: list[Optimizer] = []
        """Steps that have begun and not ended, the outermost first."""


_thread = _Thread()
_calls: OrderedDict[int, WeakMethod[Callable[[Optimizer], None]]] = OrderedDict()


def before_each_step(call: Callable[[Optimizer], None]) -> RemovableHandle:
    """Call the method `call` before each step of any optimizer; does not keep its object alive."""
    _register()
    handle = RemovableHandle(_calls)
    _calls[handle.id] = WeakMethod(call)
    return handle


def are_stepping(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if this thread is within a step of one of `optimizers`."""
    return any(each is running for running in _thread.running for each in optimizers)


@cache
def _register() -> None:
    """Register with torch, once in a process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _leave(optimizer)  # an error may have ended its step before
    for number, weakly in tuple(_calls.items()):
        if (call := weakly()) is not None:
            call(optimizer)
        else:
            _calls.pop(number, None)
    _thread.running.append(optimizer)


def _after(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _leave(optimizer)


def _leave(optimizer: Optimizer) -> None:
    """Note that a step has ended, and all that began within it."""
    for place, running in enumerate(_thread.running):
        if running is optimizer:
            del _thread.running[place:]
            return


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all that `optimizer` steps."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def wrapped_as(inner: Optimizer, optimizers: Sequence[Optimizer]) -> str | None:
    """Return the attribute of one of `optimizers` that is `inner` or holds it, as text; None if there is none."""
    pairs = ((outer, key) for outer in optimizers for key, value in vars(outer).items() if _holds(value, inner))
    return next((f"{type(outer).__name__}.{key}" for outer, key in pairs), None)


def _holds(value: object, inner: Optimizer) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(part is inner for part in parts)
