# SPDX-License-Identifier: Apache-2.0
"""Checks before ``optimizer.step()``: refuse what would let the replicas drift apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from hashlib import blake2b
from struct import pack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.runtime.world import World

__all__ = ["StepGuard", "closure_in", "settings_digest"]

UNAVERAGED = (
    "optimizer.step() with gradients that were never averaged: the last backward pass of an accumulation must be "
    "outside no_sync()"
)
UNAVERAGED_BY_CLOSURE = (
    "optimizer.step() with a closure that made gradients which were never averaged: call loss.backward() in it, or "
    "replica.average() after it has filled param.grad"
)
MIDWAY = (
    "optimizer.step() while gradients are being averaged: step after backward() has returned; if an error interrupted "
    "it, the other ranks wait for the rest: close the world and start again"
)


class StepGuard:
    """Knows whether the gradients at hand were averaged, and which optimizers have used them.

    `take_part` is called on a rank that comes to its step without any gradient, so that the others get its zeros.
    """

    def __init__(
        self,
        world: World,
        optimizers: Sequence[Optimizer],
        params: Sequence[Tensor],
        take_part: Callable[[], None],
    ) -> None:
        self._world, self._optimizers, self._take_part = world, optimizers, take_part
        self._params = sorted(params, key=Tensor.numel)  # looking at the small ones first is enough in most steps
        self._held_back = self._closed = False
        self._unused_by: set[int] = set()  # optimizers that have not stepped since gradients were averaged
        self._weights = {id(each): 1 + i % 31 for i, each in enumerate(optimizers)}
        self.steps = 0
        """The sum of all steps, each with the weight of its optimizer: it shows if ranks step different optimizers."""

    def register(self) -> list[RemovableHandle]:
        """Check before and after each step of the optimizers."""
        before = [optimizer.register_step_pre_hook(self._before) for optimizer in self._optimizers]
        return before + [optimizer.register_step_post_hook(self._after) for optimizer in self._optimizers]

    def settings(self, salt: int) -> int:
        """Return the `settings_digest` of the optimizers."""
        return settings_digest(self._optimizers, salt)

    def hold_back(self) -> None:
        """Note that a backward pass has added to gradients without averaging them."""
        self._held_back = True

    def close(self) -> None:
        """Refuse steps: gradients are on their way."""
        self._closed = True

    def open(self) -> None:
        """Allow each optimizer a step: all gradients have been averaged."""
        self._held_back = self._closed = False
        self._unused_by = {id(optimizer) for optimizer in self._optimizers}

    def drop(self) -> None:
        """Note that the gradients at hand are not to be used."""
        self._held_back = self._closed = False
        self._unused_by.clear()

    @property
    def is_due(self) -> bool:
        """True if averaged gradients are at hand for an optimizer that has not stepped with them."""
        unused = (optimizer for optimizer in self._optimizers if id(optimizer) in self._unused_by)
        return any(
            _is_filled(param.grad) for each in unused for group in each.param_groups for param in group["params"]
        )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if failure := self._world.unraised_failure:  # ended a transfer on a GPU after backward() had returned
            raise failure
        if self._closed:
            raise UsageError(MIDWAY)
        if self._are_zeroed():  # since the last backward pass: what is known is about older gradients
            self._held_back = False
            self._unused_by.clear()
        if (closure := closure_in(args, kwargs)) is not None:
            guarded = self._guarded(optimizer, closure)
            return ((args[0], guarded, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": guarded})
        self._require_averaged()
        if id(optimizer) not in self._unused_by:
            self._take_part()
        return None

    def _guarded(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure`, which makes the gradients, followed by the checks that would come before it."""

        @wraps(closure)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            self._require_averaged()
            if id(optimizer) not in self._unused_by:
                if not self._are_zeroed():
                    raise UsageError(UNAVERAGED_BY_CLOSURE)
                self._take_part()
            return value

        return guarded

    def _are_zeroed(self) -> bool:
        """Return True if no parameter has a gradient but zeros; ranks whose gradients were averaged find the same."""
        return not any(_is_filled(param.grad) for param in self._params)

    def _require_averaged(self) -> None:
        if self._held_back:
            raise UsageError(UNAVERAGED)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._unused_by.discard(id(optimizer))
        self.steps += self._weights[id(optimizer)]
        if self._held_back:  # a closure was given, and not called
            raise UsageError(f"{UNAVERAGED}. This rank's parameters have changed already: load a checkpoint")


def _is_filled(grad: Tensor | None) -> bool:
    """Return False for None and for zeros; on a GPU, which would have to be waited for, zeros count as a gradient."""
    return grad is not None and (grad.is_cuda or grad.layout != torch.strided or bool(grad.any()))


def closure_in(args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """Return the closure given to ``step(optimizer, closure)``."""
    closure: Callable[..., Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def settings_digest(optimizers: Sequence[Optimizer], salt: int) -> int:
    """Return 8 bits of all numeric settings of `optimizers`, the same in every process.

    Ranks compare them in each step, since schedulers change settings. Two different settings have equal bits once in
    256 times, and other ones for another `salt`: a difference that lasts is found. Numbers on a GPU are left out,
    because reading them would wait for it. Cost: 8 us for AdamW with one group.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    values = (group[key] for group in groups for key in sorted(group) if key != "params")  # loaded ones: other orders
    numbers = [number for value in values for number in _numbers(value)]
    return blake2b(pack(f"q{len(numbers)}d", salt, *numbers), digest_size=1).digest()[0]


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        yield float(value)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 and not value.is_complex():
        yield float(value)
