# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps with gradients that did not count change nothing, whatever a user's loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.model.gate import Gate

__all__ = ["Stepping"]

OVER = "optimizer.step() with gradients from before consolidate(): step first, then make all replicas equal"
BY_CLOSURE = "optimizer.step() with a closure: with backup workers the step must follow backward(), so leave it out"


class Stepping:
    """Around the steps of `optimizers`, and around `gate`; `begin` and `end` before and after parameters may change."""

    def __init__(
        self, optimizers: Sequence[Optimizer], gate: Gate, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._optimizers, self._gate, self._begin, self._end = optimizers, gate, begin, end
        self._is_over = False  # the step of the gradients at hand
        self._fresh: set[int] = set()  # optimizers that have not stepped since gradients counted
        self._skips = False
        self._hidden: list[tuple[Tensor, Tensor]] = []  # gradients of parameters that are not to be stepped

    def register(self) -> Iterator[RemovableHandle]:
        """Stand before and after each step."""
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(_refuse_closures)
        yield from self._gate.register()
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before)
            yield optimizer.register_step_post_hook(self._after)

    def renew(self, counted: bool) -> None:
        """A backward pass has ended, and its gradients `counted` or not."""
        self._is_over = False
        self._fresh = {id(optimizer) for optimizer in self._optimizers} if counted else set()

    def end_step(self) -> None:
        """All take the weights as they are for those of the step: who steps with gradients at hand learns that."""
        self._is_over = self._gate.is_due
        self._gate.drop()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_over:
            raise UsageError(OVER)
        self._begin()
        self._skips = id(optimizer) not in self._fresh
        if self._skips:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._hidden = [(param, param.grad) for param in params if param.grad is not None]
            for param in params:
                param.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._fresh.discard(id(optimizer))
        for param, grad in self._hidden:
            param.grad = grad
        self._gate.steps -= self._skips  # it was none
        self._skips, self._hidden = False, []
        self._end()


def _refuse_closures(_: Optimizer, args: Any, kwargs: Any) -> None:
    if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
        raise UsageError(BY_CLOSURE)
