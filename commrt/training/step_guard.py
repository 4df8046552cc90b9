# SPDX-License-Identifier: Apache-2.0
"""When optimizers may step a model whose gradients are averaged, and the count of their steps.

Each may step once after an average, or replicas would drift apart; ranks compare the count in each
step. On the thread that steps, asked by `optimizer_steps`, and on that of the backward pass; writes
to no optimizer or tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from commrt.errors import UsageError
from commrt.runtime.untraced import untraced
from commrt.training.loss_scale import LossScales
from commrt.training.settings import settings_digest

UNAVERAGED = (
    "optimizer.step() with gradients that were never averaged: the last backward pass of an"
    " accumulation must be outside no_sync()"
)
MIDWAY = (
    "optimizer.step() while gradients are being averaged: step after backward() has returned; if an"
    " error interrupted it, the other ranks wait for the rest: close the world and start again"
)


@untraced
class StepGuard:
    """Knows whether the gradients at hand were averaged, and which optimizers have used them.

    `take_part` is called on a rank that comes to its step without any gradient, so that the others
    get its zeros. A replica calls `close`, `open` and `drop`, in hooks of the backward pass too;
    `OptimizerSteps` calls `before_step` and `after_step`. Written here of others: the scalers that
    `scales` know. `SkippingGuard` replaces these two methods, and writes `_refusal` and
    `held_back` too.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: Sequence[Tensor],
        take_part: Callable[[], None],
        scales: LossScales,
    ) -> None:
        self._optimizers = optimizers
        self._take_part = take_part
        self._scales = scales
        # the small ones first, which is enough in most steps
        self._params = sorted(params, key=Tensor.numel)
        self.held_back = False
        """True after a backward pass that added to gradients without averaging them.

        Replicas set it to True for each gradient of such a pass: by hand, as a call would cost.
        """
        self._refusal = ""  # why no optimizer may step now
        # optimizers that have not stepped since gradients were averaged
        self._unused_by: set[int] = set()
        # by optimizer: what a step of it adds to `steps`
        self._weights = {id(each): 1 + i % 31 for i, each in enumerate(optimizers)}
        self.steps = 0
        """The sum of all steps, weighted by optimizer: it shows if ranks step different ones.

        `Standing`, of backup workers, sets it between steps where another state is taken over.
        """

    def close(self, step: int) -> tuple[int, int]:
        """Refuse steps while gradients travel; return what ranks compare in training step `step`.

        That is `steps`, and a digest of the settings of optimizers and scalers.
        """
        self._refusal = MIDWAY
        scales = self._scales.values() if self._scales.known else ()
        return self.steps, settings_digest(self._optimizers, step, scales)

    def restart(self, also: Iterable[object]) -> None:
        """Count steps anew, and know only scalers in `also`: ranks may have stepped differently."""
        self.steps = 0
        self._scales.begin(also)

    def open(self) -> None:
        """Allow each optimizer a step: all gradients have been averaged."""
        self.held_back = False
        self._refusal = ""
        self._unused_by = set(self._weights)

    def drop(self) -> None:
        """Note that the gradients at hand are not to be used."""
        self.held_back = False
        self._refusal = ""
        self._unused_by.clear()

    @property
    def is_due(self) -> bool:
        """True if averaged gradients are at hand that some optimizer has not used."""
        if not self._unused_by:
            return False
        unused = (optimizer for optimizer in self._optimizers if id(optimizer) in self._unused_by)
        return not are_zeroed(
            param for each in unused for group in each.param_groups for param in group["params"]
        )

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Refuse a step with gradients that were not averaged; return arguments for a closure.

        Where all are zeros or None, the loop has thrown away those of the latest pass: forget them.
        """
        if self._refusal:
            raise UsageError(self._refusal)
        if are_zeroed(self._params):
            self.held_back = False
            self._unused_by.clear()
        if (closure := closure_in(args, kwargs)) is not None:
            guarded = self._guarded(optimizer, closure)
            return (
                ((args[0], guarded, *args[2:]), kwargs)
                if len(args) > 1
                else (args, {**kwargs, "closure": guarded})
            )
        if self.held_back:
            raise UsageError(UNAVERAGED)
        if id(optimizer) not in self._unused_by:
            self._take_part()
        return None

    def _guarded(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure`, which makes the gradients, and after it the checks due before it."""

        @wraps(closure)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            if self.held_back:
                raise UsageError(UNAVERAGED)
            if id(optimizer) not in self._unused_by:
                if not are_zeroed(self._params):
                    raise UsageError(
                        "optimizer.step() with a closure that made gradients which were never"
                        " averaged: call loss.backward() in it, or replica.average() after it has"
                        " filled param.grad"
                    )
                self._take_part()
            return value

        return guarded

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has stepped."""
        number = id(optimizer)
        self._unused_by.discard(number)
        self.steps += self._weights[number]
        self._scales.notice()
        if self.held_back:  # a closure was given, and not called
            raise UsageError(
                f"{UNAVERAGED}. This rank's parameters have changed already: load a checkpoint"
            )


def are_zeroed(params: Iterable[Tensor]) -> bool:
    """Return True if all gradients are zeros; one on a GPU, which would wait, counts as not."""
    for param in params:
        grad = param.grad
        if grad is not None and (grad.is_cuda or grad.layout != torch.strided or grad.any()):
            return False
    return True


def closure_in(args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """Return the closure given to ``step(optimizer, closure)``."""
    return cast("Callable[..., Any] | None", args[1] if len(args) > 1 else kwargs.get("closure"))
