# SPDX-License-Identifier: Apache-2.0
"""Hooks on gradients and modules; each runs on the thread that autograd or the module is on.

C++ holds the hooks of a parameter, where Python's garbage collector does not look: what they refer
to would never be freed if it referred back. So these refer weakly to a replica, and the model's
modules keep the replica alive.

Some parts of torch's autograd engine that are used here are not public yet; DDP and FSDP use the
same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from commrt.buckets.gradient_bucket import SPARSE
from commrt.buckets.ready_order import ReadyOrder
from commrt.buckets.tensors import Named
from commrt.errors import UsageError

INTERRUPTED = (
    "{what} came from a backward pass inside or after one that did not end: an error interrupted"
    " it, or reentrant activation checkpointing is on (use use_reentrant=False)"
)
"""Replicas raise it, in their hooks of gradients: they know which pass their step is of."""
OUTLIVED = "{name} outlived the model it was attached with: keep the model or its replica"
NO_PASS = -1
"""Stands for the number of a backward pass where there is none."""
ATTRIBUTE = "_commrt"
"""Where a module holds a `Keeper`."""

T = TypeVar("T")
current_pass: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return the number of the backward pass that this thread runs; -1 outside of one."""
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
)
"""Call a function when the running backward pass has ended; ``backward()`` raises its error."""


def on_dense_gradients(
    owner: T,
    params: Iterable[Named],
    call: Callable[[T, str], None],
    *,
    once_per_pass: bool = False,
) -> Iterator[RemovableHandle]:
    """Call ``call(owner, name)`` each time a gradient is ready; does not keep `owner` alive.

    With `once_per_pass` only the first gradient of a backward pass does so. ``backward()`` raises
    `UsageError` for a sparse gradient, and for a parameter that outlived `owner`.
    """
    weakly = ref(owner)
    latest: int | None = None

    def ready(name: str, param: Tensor) -> None:
        nonlocal latest
        grad = param.grad
        number = current_pass()
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(SPARSE.format(name=name, layout=grad.layout))
        if number == latest:
            return
        if (here := weakly()) is None:
            raise UsageError(OUTLIVED.format(name=name))
        call(here, name)
        if once_per_pass:
            latest = number

    return (_on_accumulated(param, partial(ready, name)) for name, param in params)


def on_counted_gradients(
    owner: T,
    params: Iterable[Named],
    order: ReadyOrder,
    fill: Callable[[T], None],
    refuse: Callable[[T, str], None],
) -> Iterator[RemovableHandle]:
    """Let `order` count gradients as they become ready; does not keep `owner` alive.

    It calls ``fill(owner)`` when a bucket has all of its gradients, and ``refuse(owner, name)`` for
    a gradient that it does not await, such as the first of a pass. Of all others nothing runs here,
    which is why `on_dense_gradients` does not do for both. ``backward()`` raises `UsageError` for a
    sparse gradient among those refused, and for a parameter that outlived `owner`.
    """
    weakly = ref(owner)

    def filled() -> None:
        if (here := weakly()) is not None:
            fill(here)

    def refused(name: str, param: Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(SPARSE.format(name=name, layout=grad.layout))
        if (here := weakly()) is None:
            raise UsageError(OUTLIVED.format(name=name))
        refuse(here, name)

    return (_on_accumulated(param, order.counter(name, filled, refused)) for name, param in params)


def _on_accumulated(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]


class PassEnd:
    """Calls `ended` where the running backward pass ends, then `anyway`; on an error only this."""

    def __init__(self, ended: Callable[[], None], anyway: Callable[[], None]) -> None:
        self._ended = ended
        self._anyway: Callable[[], None] | None = anyway
        at_end_of_backward(self)

    def __call__(self) -> None:
        """End the pass; autograd calls this."""
        anyway = self._anyway
        self._anyway = None
        try:
            self._ended()
        finally:
            if anyway is not None:
                anyway()

    def __del__(self) -> None:  # autograd lets go of what an error keeps it from calling
        if self._anyway is not None:
            self._anyway()


class ModuleHook:
    """A hook of a module, on the thread that calls the module or its ``state_dict()``.

    Does nothing on copies and pickles of the module, nor while torch compiles it.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Pass everything on; a compiled graph would break here."""
        if not (torch.compiler.is_compiling() or self._call is None):
            self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


class Keeper(list[object]):
    """Keeps its items alive as long as the module that holds it; copied or pickled it is None."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
