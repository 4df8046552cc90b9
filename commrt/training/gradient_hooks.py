# SPDX-License-Identifier: Apache-2.0
"""Hooks on the gradients of parameters; each runs on the thread that runs the backward pass.

They call a replica, and nothing else. `on_dense_gradients` raises for every sparse gradient,
`on_counted_gradients` for those that the order of buckets does not await; buckets look at others.

C++ holds the hooks of a parameter, where Python's garbage collector does not look: what they refer
to would never be freed if it referred back. So these refer weakly to a replica, and the model's
modules keep the replica alive (`Keeper`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from commrt.buckets.gradient_bucket import SPARSE
from commrt.buckets.ready_order import ReadyOrder
from commrt.buckets.tensors import Named
from commrt.errors import UsageError
from commrt.training.backward_pass import current_pass

OUTLIVED = "{name} outlived the model it was attached with: keep the model or its replica"

T = TypeVar("T")


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
    latest: int | None = None  # the pass in which `call` was called last

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
    other: Callable[[T, str], None],
) -> Iterator[RemovableHandle]:
    """Let `order` count gradients as they become ready; does not keep `owner` alive.

    It calls ``fill(owner)`` when a bucket has all of its gradients, and ``other(owner, name)`` for
    a gradient that it does not await, such as the first of a pass. Of all others nothing runs here,
    which is why `on_dense_gradients` does not do for both. ``backward()`` raises `UsageError` for a
    sparse gradient among these, and for a parameter that outlived `owner`.
    """
    weakly = ref(owner)

    def filled() -> None:
        if (here := weakly()) is not None:
            fill(here)

    def not_awaited(name: str, param: Tensor) -> None:
        grad = param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(SPARSE.format(name=name, layout=grad.layout))
        if (here := weakly()) is None:
            raise UsageError(OUTLIVED.format(name=name))
        other(here, name)

    return (
        _on_accumulated(param, order.counter(name, filled, not_awaited)) for name, param in params
    )


def _on_accumulated(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call,no-any-return]
