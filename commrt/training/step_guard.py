# SPDX-License-Identifier: Apache-2.0
"""Which optimizers may step an attached model, and when: what they step was averaged.

Else replicas would drift apart. torch calls `_before_any_step` and `_after_any_step` around each
step of any optimizer in this process. They ask the `OptimizerSteps` of each attached model, on the
thread that steps. Where gradients are averaged, these ask a `StepGuard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commrt.errors import UsageError
from commrt.runtime.untraced import untraced
from commrt.runtime.world import World
from commrt.training.loss_scale import LossScales
from commrt.training.parameter_list import ParameterList
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
class OptimizerSteps:
    """The steps of all optimizers, as one attached model sees them.

    Of those that were given to `attach`, ``before(optimizer, args, kwargs)`` is called before each
    step, and may return other arguments for it; ``after(optimizer)`` after it. The `checks` come
    before, but not for a step inside another one.
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

    def check(self, optimizer: Optimizer) -> None:
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
            steps.check(optimizer)
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


@untraced
class StepGuard:
    """Knows whether the gradients at hand were averaged, and which optimizers have used them.

    `take_part` is called on a rank that comes to its step without any gradient, so that the others
    get its zeros.
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
        # True after a backward pass that added to gradients without averaging them
        self.held_back = False
        self._refusal = ""  # why no optimizer may step now
        # optimizers that have not stepped since gradients were averaged
        self._unused_by: set[int] = set()
        self._weights = {id(each): 1 + i % 31 for i, each in enumerate(optimizers)}
        self.steps = 0
        """The sum of all steps, weighted by optimizer: it shows if ranks step different ones."""

    def close(self, step: int) -> tuple[int, int]:
        """Refuse steps while gradients travel; return steps so far and a digest of settings."""
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
        """Refuse a step with gradients that were not averaged; return arguments for a closure."""
        if self._refusal:
            raise UsageError(self._refusal)
        # since the last backward pass: what is known is about older gradients
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
