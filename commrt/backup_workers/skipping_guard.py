# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that change nothing after gradients that did not count.

On the thread that steps, asked by `optimizer_steps`; `end_step` in a collective. It takes
``param.grad`` away before such a step, and puts it back after.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from commrt.errors import UsageError
from commrt.training.step_guard import UNAVERAGED, StepGuard, are_zeroed, closure_in


class SkippingGuard(StepGuard):
    """A guard with which optimizer steps change nothing after gradients that did not count,
    whatever a loop calls.

    Replaces `before_step` of its parent, which `OptimizerSteps` calls, and `after_step`, which
    `BackupWorkersReplica` calls, and writes its `_refusal` and `held_back`. `take_part`, here
    `ReplicaState.shut`, is called before each step, as parameters may change then. Written by
    others: `held_back`, set to True by `BackupWorkersReplica`, and `steps`, by `Standing`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # by optimizer: gradients that its step must not see
        self._hidden: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def end_step(self) -> None:
        """Refuse further steps with the gradients at hand:
        all ranks take the weights as they are.
        """
        if self.is_due:
            self.drop()
            self._refusal = (
                "optimizer.step() with gradients from before consolidate(): step first, then make"
                " all replicas equal"
            )

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step with gradients that were not averaged; hide those that did not count."""
        if closure_in(args, kwargs) is not None:
            raise UsageError(
                "optimizer.step() with a closure: with backup workers the step must follow"
                " backward(), so leave it out"
            )
        if self._refusal:
            raise UsageError(self._refusal)
        if self.held_back and not are_zeroed(self._params):
            raise UsageError(UNAVERAGED)
        self.held_back = False
        self._hidden.pop(id(optimizer), None)  # an error may have ended a step that hid some
        self._take_part()
        if id(optimizer) not in self._unused_by:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._hidden[id(optimizer)] = [
                (param, param.grad) for param in params if param.grad is not None
            ]
            for param in params:
                param.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        """See `StepGuard.after_step`; does not count a step that changed nothing."""
        if (hidden := self._hidden.pop(id(optimizer), None)) is None:
            super().after_step(optimizer)
            return
        for param, grad in hidden:
            param.grad = grad
