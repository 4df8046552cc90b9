# SPDX-License-Identifier: Apache-2.0
"""The parts of torch's autograd engine that are not public yet; DDP and FSDP stand on the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError

__all__ = ["INTERRUPTED", "at_end_of_backward", "current_pass", "on_dense_gradients", "on_gradient"]

INTERRUPTED = (
    "{what} came from a backward pass inside or after one that did not end: an error interrupted it, or reentrant "
    "activation checkpointing is on (use use_reentrant=False)"
)


T = TypeVar("T")


def current_pass() -> int:
    """The number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()  # noqa: SLF001


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass has ended; its error is raised by ``backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def on_gradient(param: nn.Parameter, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `callback` with `param` each time a backward pass has added to ``param.grad``."""
    return cast("RemovableHandle", param.register_post_accumulate_grad_hook(callback))  # type: ignore[no-untyped-call]  # torch's own


def on_dense_gradients(
    owner: T, params: Iterable[tuple[str, nn.Parameter]], call: Callable[[T, str], None]
) -> Iterator[RemovableHandle]:
    """Call ``call(owner, name)`` each time the gradient of a parameter is ready; does not keep `owner`.

    Raises `UsageError` in the backward pass for a sparse gradient, and for a parameter that outlived `owner`.
    """
    weakly = ref(owner)

    def told_of(name: str) -> Callable[[Tensor], None]:
        def ready(param: Tensor) -> None:
            here = weakly()
            if here is None:
                raise UsageError(f"{name} outlived the model it was attached with: keep the model or its replica")
            if param.grad is not None and param.grad.layout != torch.strided:
                raise UsageError(f"the gradient of {name} is {param.grad.layout}: only dense gradients can be averaged")
            call(here, name)

        return ready

    return (on_gradient(param, told_of(name)) for name, param in params)
