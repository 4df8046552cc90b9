# SPDX-License-Identifier: Apache-2.0
"""The gate before ``optimizer.step()``: refuses what would let the replicas drift apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.model.settings import digest

__all__ = ["Gate"]

UNAVERAGED = (
    "optimizer.step() with gradients that were never averaged: the last backward pass of an accumulation must be "
    "outside no_sync()"
)
BY_CLOSURE = (
    "optimizer.step() with a closure that made gradients which were never averaged: call loss.backward() in it, or "
    "replica.average() after it has filled param.grad"
)
MIDWAY = (
    "optimizer.step() while gradients are being averaged: step after backward() has returned; if an error interrupted "
    "it, the other ranks wait for the rest: close the world and start again"
)


class Gate:
    """Knows whether the gradients at hand were averaged, and by which optimizers they have been used.

    A rank that comes to its step without any gradient calls `take_part` first, so that the others get its zeros.
    `refuse` is called with a parameter that has a gradient which nobody averages, `require_sound` before each step.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: Sequence[Tensor],
        take_part: Callable[[], None],
        refuse: Callable[[Tensor], None],
        require_sound: Callable[[], None],
    ) -> None:
        self._optimizers = optimizers
        self._params = sorted(params, key=Tensor.numel)  # looking at the small ones first is enough in most steps
        self._averaged_here = {id(param) for param in params}
        self._take_part = take_part
        self._refuse = refuse
        self._require_sound = require_sound
        self._held_back = False
        self._closed = False
        self._unused_by: set[int] = set()
        """Optimizers that have not stepped since gradients were averaged."""
        self.steps = 0
        """How often an optimizer has stepped."""

    def register(self) -> list[RemovableHandle]:
        """Stand before and after each step of the optimizers."""
        before = [optimizer.register_step_pre_hook(self._before) for optimizer in self._optimizers]
        return before + [optimizer.register_step_post_hook(self._after) for optimizer in self._optimizers]

    def settings(self, salt: int) -> int:
        """A digest of the numbers with which the optimizers step; see `commrt.model.settings`."""
        return digest(self._optimizers, salt)

    def hold_back(self) -> None:
        """A backward pass has added to gradients without averaging them."""
        self._held_back = True

    def close(self) -> None:
        """Gradients are on their way."""
        self._closed = True

    def open(self) -> None:
        """All gradients have been averaged."""
        self._held_back = self._closed = False
        self._unused_by = {id(optimizer) for optimizer in self._optimizers}

    def drop(self) -> None:
        """The gradients at hand are not to be used."""
        self._held_back = self._closed = False
        self._unused_by.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._require_sound()
        self._refuse_strangers(optimizer)
        if self._closed:
            raise UsageError(MIDWAY)
        if self._are_zeroed():  # since: what is known is about older ones
            self._held_back = False
            self._unused_by.clear()
        if len(args) > 1 and args[1] is not None:
            return (args[0], self._guarded(optimizer, args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._guarded(optimizer, kwargs["closure"])}
        self._require_averaged()
        if id(optimizer) not in self._unused_by:
            self._take_part()
        return None

    def _guarded(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure`, which makes the gradients, and then what else is done before the step."""

        @wraps(closure)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            self._require_averaged()
            if id(optimizer) not in self._unused_by:
                if not self._are_zeroed():
                    raise UsageError(BY_CLOSURE)
                self._take_part()
            return value

        return guarded

    @property
    def is_due(self) -> bool:
        """True if averaged gradients are at hand, with which some optimizer has not stepped."""
        return bool(self._unused_by) and not self._are_zeroed()

    def _are_zeroed(self) -> bool:
        """True if no parameter has a gradient but zeros; ranks whose gradients were averaged find the same."""
        return not any(_is_filled(param.grad) for param in self._params)

    def _require_averaged(self) -> None:
        if self._held_back:
            raise UsageError(UNAVERAGED)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._unused_by.discard(id(optimizer))
        self.steps += 1
        if self._held_back:  # a closure was given, and not called
            raise UsageError(f"{UNAVERAGED}. This rank's parameters have changed already: load a checkpoint")

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and id(param) not in self._averaged_here:
                    self._refuse(param)


def _is_filled(grad: Tensor | None) -> bool:
    """False for None and for zeros; on a GPU that would have to be waited for, so there zeros count as a gradient."""
    return grad is not None and (grad.is_cuda or grad.layout != torch.strided or bool(grad.any()))
