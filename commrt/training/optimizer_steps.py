# SPDX-License-Identifier: Apache-2.0
"""The steps of all optimizers of this process, as the attached models see and may refuse them.

torch calls `_before_any_step` and `_after_any_step` around each step, on the thread that steps.
They ask the `OptimizerSteps` of each attached model, which `_living` lists: an optimizer must step
what was attached, and have been given. Nothing here writes to an optimizer or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commrt.errors import UsageError
from commrt.runtime.untraced import untraced
from commrt.runtime.world import World
from commrt.training.parameter_list import ParameterList


@untraced
class OptimizerSteps:
    """The steps of all optimizers, as one attached model sees them.

    Of those that were given to `attach`, ``before(optimizer, args, kwargs)`` is called before each
    step, and may return other arguments for it; ``after(optimizer)`` after it. The `checks` come
    before, but not for a step inside another one.

    The hooks of this module and replicas read its attributes. Only the hooks write one of them,
    `running`, here and in `begin_step`, on the thread that steps.
    """

    def __init__(
        self,
        world: World,
        parameters: ParameterList,
        averaged: Iterable[Tensor],
        optimizers: Sequence[Optimizer],
        *,
        before: Callable[[Optimizer, Any, Any], Any],
        after: Callable[[Optimizer], None],
        checks: Sequence[Callable[[], None]],
    ) -> None:
        self.world = world
        self._parameters = parameters
        self.averaged = frozenset(map(id, averaged))
        """The ids of the parameters that were attached."""
        self.optimizers = optimizers
        self.before = before
        self.after = after
        self._checks = checks
        self.running: list[Optimizer] = []
        """Those of `optimizers` whose steps have begun, the outermost first."""

    def begin(self) -> None:
        """Look at all steps from now on, until `end`."""
        _register_with_torch()
        _living[id(self)] = self

    def end(self) -> None:
        """Look at no more steps; safe to call twice."""
        _living.pop(id(self), None)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Refuse a step that would let replicas drift apart; note that a given optimizer steps."""
        if optimizer not in self.optimizers:
            self._check_stranger(optimizer)
            return
        while optimizer in self.running:  # an error ended its step, and all that began within it
            self.running.pop()
        # a transfer on a GPU may fail after backward() has returned
        if self.world.ending.late_failure is not None:
            self.world.ending.raise_late_failure()
        for group in optimizer.param_groups:
            if not self.averaged.issuperset(map(id, group["params"])):
                for param in group["params"]:
                    if param.grad is not None and not self._is_attached(param):
                        self._parameters.require_unchanged()  # which says more
                        self._refuse_param(param)
        if not self.running:
            for check in self._checks:
                check()
        self.running.append(optimizer)

    def _check_stranger(self, optimizer: Optimizer) -> None:
        """Refuse a step of this model by an optimizer that was not given and passes nothing on."""
        if self.running:
            return
        names = self._parameters.names()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in names and param.grad is not None:
                    if not self._is_attached(param):
                        self._refuse_param(param)
                    self._refuse_stranger(optimizer, names[id(param)])

    def _is_attached(self, param: Tensor) -> bool:
        return id(param) in self.averaged or id(param) in attached_params()

    def _refuse_param(self, param: Tensor) -> None:
        shape = f"a parameter of shape {list(param.shape)}"
        name = self._parameters.names().get(id(param), shape)
        raise UsageError(
            f"the optimizer steps {name}, which was frozen, absent or outside of the model when"
            " it was attached: commrt does not average its gradient; detach() and attach()"
            " again"
        )

    def _refuse_stranger(self, optimizer: Optimizer, name: str) -> None:
        """Raise `UsageError` unless `optimizer` passes its steps on to a given one, or none is."""
        if self.optimizers and not any(wrapped_as(each, [optimizer]) for each in self.optimizers):
            inner = wrapped_as(optimizer, self.optimizers)
            which = (
                "all optimizers that step the model"
                if inner is None
                else f"{inner}, whose step() is called"
            )
            raise UsageError(
                f"{type(optimizer).__name__} steps {name}, and was not given to attach(): detach(),"
                f" and attach() again with {which}"
            )


_living: WeakValueDictionary[int, OptimizerSteps] = WeakValueDictionary()
"""By id, one for each model that is attached; any thread may attach and detach."""


@cache
def _register_with_torch() -> None:
    """Let `_living` look at each step of any optimizer, once in a process.

    torch calls such hooks before and after all that users register with an optimizer. So these may
    write weights before its step, and after it.
    """
    register_optimizer_step_pre_hook(_before_any_step)
    register_optimizer_step_post_hook(_after_any_step)


@untraced
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Ask all models whether `optimizer` may step, then let those to which it was given act.

    Returns other arguments for its step, or None.
    """
    changed = None
    living = _living.valuerefs()  # a list: other threads attach and detach meanwhile
    for weakly in living:
        steps = weakly()
        if steps is not None:
            steps.begin_step(optimizer)
    for weakly in living:
        steps = weakly()
        if steps is None or optimizer not in steps.optimizers:
            continue
        instead = steps.before(optimizer, args, kwargs)
        if instead is not None:
            changed = instead
            args, kwargs = instead
    return changed


@untraced
def _after_any_step(optimizer: Optimizer, *_: Any) -> None:
    for weakly in _living.valuerefs():
        steps = weakly()
        if steps is not None and optimizer in steps.optimizers:
            steps.after(optimizer)
            while optimizer in steps.running:
                steps.running.pop()


def attached_params() -> set[int]:
    """Return the ids of all parameters that are attached."""
    living = [weakly() for weakly in _living.valuerefs()]
    return set().union(*(steps.averaged for steps in living if steps is not None))


def attached_to(world: World) -> int:
    """Return how many models are attached to `world`.

    One that was dropped without `detach` counts until Python has collected it.
    """
    return sum(getattr(weakly(), "world", None) is world for weakly in _living.valuerefs())


def wrapped_as(inner: Optimizer, optimizers: Sequence[Optimizer]) -> str | None:
    """Return which attribute of `optimizers` is `inner` or holds it, as text; None if none does."""
    for outer in optimizers:
        for key, value in vars(outer).items():
            if isinstance(value, dict):
                parts = [*value.values()]
            elif isinstance(value, list | tuple):
                parts = [*value]
            else:
                parts = [value]
            if any(part is inner for part in parts):
                return f"{type(outer).__name__}.{key}"
    return None
