# SPDX-License-Identifier: Apache-2.0
"""Hooks on models and on autograd, and objects that live as long as a model.

C++ holds the hooks of a parameter, where Python's garbage collector does not look: what they refer to would never be
freed if it referred back. So hooks refer weakly to a replica, and the model's modules keep the replica alive.

Some parts of torch's autograd engine that are used here are not public yet; DDP and FSDP use the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError

__all__ = [
    "INTERRUPTED",
    "ModuleHook",
    "at_end_of_backward",
    "current_pass",
    "keep_alive",
    "let_go",
    "on_dense_gradients",
    "on_gradient",
]

INTERRUPTED = (
    "{what} came from a backward pass inside or after one that did not end: an error interrupted it, or reentrant "
    "activation checkpointing is on (use use_reentrant=False)"
)
ATTRIBUTE = "_commrt"
"""Where a module keeps what must live as long as it does."""

T = TypeVar("T")


def current_pass() -> int:
    """Return the number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass has ended; ``backward()`` raises its error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def on_gradient(param: nn.Parameter, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `callback` with `param` each time a backward pass has added to ``param.grad``."""
    return cast("RemovableHandle", param.register_post_accumulate_grad_hook(callback))  # type: ignore[no-untyped-call]  # torch's own


def on_dense_gradients(
    owner: T, params: Iterable[tuple[str, nn.Parameter]], call: Callable[[T, str], None]
) -> Iterator[RemovableHandle]:
    """Call ``call(owner, name)`` each time the gradient of a parameter is ready; does not keep `owner` alive.

    ``backward()`` raises `UsageError` for a sparse gradient, and for a parameter that outlived `owner`.
    """
    weakly = ref(owner)

    def ready(name: str, param: Tensor) -> None:
        here, grad = weakly(), param.grad
        if here is None:
            raise UsageError(f"{name} outlived the model it was attached with: keep the model or its replica")
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(f"the gradient of {name} is {grad.layout}: only dense gradients can be averaged")
        call(here, name)

    return (on_gradient(param, partial(ready, name)) for name, param in params)


class ModuleHook:
    """A hook of a module that does nothing on a copy or a pickle of the module, nor while torch compiles it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Pass everything on; a compiled graph would break here."""
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[Callable[..., None]]]:
        return ModuleHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """Do nothing, on a copy of a module."""


class _Keeper:
    """Keeps `kept` alive; a copy or a pickle of it is None."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def keep_alive(kept: object, modules: Iterable[nn.Module]) -> None:
    """Keep `kept` alive until the last of `modules` is gone, or `let_go`."""
    for module in modules:
        module.__dict__[ATTRIBUTE] = _Keeper(kept)


def let_go(modules: Iterable[nn.Module]) -> None:
    """Undo `keep_alive`."""
    for module in modules:
        module.__dict__.pop(ATTRIBUTE, None)
