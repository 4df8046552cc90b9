# SPDX-License-Identifier: Apache-2.0
"""Skip the optimizer's step of a rank whose gradients did not count, whatever its loop calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.errors import UsageError
from commrt.training.step_guard import StepGuard, closure_in

__all__ = ["StepSkipper"]

OVER = "optimizer.step() with gradients from before consolidate(): step first, then make all replicas equal"
CLOSURE = "optimizer.step() with a closure: with backup workers the step must follow backward(), so leave it out"


class StepSkipper:
    """Makes optimizer steps with gradients that did not count change nothing, whatever a user's loop calls.

    It wraps the steps of `optimizers` and `guard`; `begin` is called before parameters may change.
    """

    def __init__(self, optimizers: Sequence[Optimizer], guard: StepGuard, begin: Callable[[], None]) -> None:
        self._optimizers, self._guard, self._begin = optimizers, guard, begin
        self._is_over = False  # the step of the gradients at hand
        self._steps = 0  # of the guard
        self._fresh: set[int] = set()  # optimizers that have not stepped since gradients counted
        self._skips = False
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters that are not to be stepped, and their gradients

    def register(self) -> Iterator[RemovableHandle]:
        """Act before and after each step of the optimizers."""
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(_refuse_closures)
        yield from self._guard.register()
        for optimizer in self._optimizers:
            yield optimizer.register_step_pre_hook(self._before)
            yield optimizer.register_step_post_hook(self._after)

    def renew(self, counted: bool) -> None:
        """Note that a backward pass has ended, and whether its gradients `counted`."""
        self._is_over = False
        self._fresh = {id(optimizer) for optimizer in self._optimizers} if counted else set()

    def end_step(self) -> None:
        """Refuse further steps with the gradients at hand: all ranks take the weights as they are."""
        self._is_over = self._guard.is_due
        self._guard.drop()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_over:
            raise UsageError(OVER)
        self._begin()
        self._skips, self._steps = id(optimizer) not in self._fresh, self._guard.steps
        if self._skips:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._hidden = [(param, param.grad) for param in params if param.grad is not None]
            for param in params:
                param.grad = None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._fresh.discard(id(optimizer))
        for param, grad in self._hidden:
            param.grad = grad
        if self._skips:  # the guard counted a step that was none
            self._guard.steps = self._steps
        self._skips, self._hidden = False, []


def _refuse_closures(_: Optimizer, args: Any, kwargs: Any) -> None:
    if closure_in(args, kwargs) is not None:
        raise UsageError(CLOSURE)
