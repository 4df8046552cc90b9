# SPDX-License-Identifier: Apache-2.0
"""Hooks on models, autograd and optimizers, and what is checked in each step.

Replicas must not drift apart: what an optimizer steps was averaged, nobody else steps it, and the model is still the
one that was attached.

C++ holds the hooks of a parameter, where Python's garbage collector does not look: what they refer to would never be
freed if it referred back. So these refer weakly to a replica, and the model's modules keep the replica alive.

Some parts of torch's autograd engine that are used here are not public yet; DDP and FSDP use the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import blake2b
from itertools import chain
from operator import is_
from struct import pack
from typing import Any, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from commrt.buckets.header import WIDTHS
from commrt.buckets.layout import MODEL_CHANGED, Named
from commrt.buckets.ready_order import ReadyOrder
from commrt.errors import UsageError
from commrt.training.loss_scale import LossScales

NUMBERS = (int, float, np.integer, np.floating, np.bool_)
PLAIN = frozenset({int, float, bool})
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
INTERRUPTED = (
    "{what} came from a backward pass inside or after one that did not end: an error interrupted it, or reentrant "
    "activation checkpointing is on (use use_reentrant=False)"
)
TWICE = (
    "the gradient of {name} became ready twice in one backward pass. Reentrant activation checkpointing does that: use "
    "checkpoint(..., use_reentrant=False)"
)
OUTLIVED = "{name} outlived the model it was attached with: keep the model or its replica"
UNAVERAGED = (
    "optimizer.step() with gradients that were never averaged: the last backward pass of an accumulation must be "
    "outside no_sync()"
)
MIDWAY = (
    "optimizer.step() while gradients are being averaged: step after backward() has returned; if an error interrupted "
    "it, the other ranks wait for the rest: close the world and start again"
)
NO_PASS = -1
"""In place of the number of a backward pass."""
ATTRIBUTE = "_commrt"
"""Where a module holds a `Keeper`."""

T = TypeVar("T")
current_pass: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return the number of the backward pass that this thread runs; -1 outside of one."""
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
"""Call a function when the running backward pass has ended; ``backward()`` raises its error."""


def on_dense_gradients(
    owner: T, params: Iterable[Named], call: Callable[[T, str], None], *, once_per_pass: bool = False
) -> Iterator[RemovableHandle]:
    """Call ``call(owner, name)`` each time the gradient of a parameter is ready; does not keep `owner` alive.

    With `once_per_pass` only the first gradient of a backward pass does so. ``backward()`` raises `UsageError` for a
    sparse gradient, and for a parameter that outlived `owner`.
    """
    weakly, latest = ref(owner), NO_PASS

    def ready(name: str, param: Tensor) -> None:
        nonlocal latest
        grad, number = param.grad, current_pass()
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(f"the gradient of {name} is {grad.layout}: only dense gradients can be averaged")
        if number == latest:
            return
        if (here := weakly()) is None:
            raise UsageError(OUTLIVED.format(name=name))
        call(here, name)
        if once_per_pass:
            latest = number

    return (param.register_post_accumulate_grad_hook(partial(ready, name)) for name, param in params)  # type: ignore[no-untyped-call]  # torch's own


def on_counted_gradients(
    owner: T,
    params: Iterable[Named],
    order: ReadyOrder,
    fill: Callable[[T], None],
    refuse: Callable[[T, str], None],
) -> Iterator[RemovableHandle]:
    """Let `order` count gradients as they become ready; does not keep `owner` alive.

    It calls ``fill(owner)`` when a bucket has all of its gradients, and ``refuse(owner, name)`` for a gradient that it
    does not await, such as the first of a pass. ``backward()`` raises `UsageError` for a parameter that outlived
    `owner`.
    """
    weakly = ref(owner)

    def filled() -> None:
        if (here := weakly()) is not None:
            fill(here)

    def refused(name: str) -> None:
        if (here := weakly()) is None:
            raise UsageError(OUTLIVED.format(name=name))
        refuse(here, name)

    return (param.register_post_accumulate_grad_hook(order.counter(name, filled, refused)) for name, param in params)  # type: ignore[no-untyped-call]  # torch's own


class ModuleHook:
    """A hook of a module that does nothing on a copy or a pickle of the module, nor while torch compiles it."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Pass everything on; a compiled graph would break here."""
        if not (torch.compiler.is_compiling() or self._call is None):
            self._call(*args)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


class Keeper(list[object]):
    """Keeps its items alive for as long as the module that holds it; a copy or a pickle of it is None."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class ParameterList:
    """The parameters of a model as they are now; modules without any may come and go later.

    Cost of a check: 0.1 us per module and parameter, and a walk through the model after a module has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = _names(model)
        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        modules = model.named_modules()
        self._tables = [each for each in modules if isinstance(each[1], EMBEDDINGS) and each[1].max_norm is None]
        self._remember()

    def require_unchanged(self) -> None:
        """Raise `UsageError` if a parameter came or went, requires a gradient now, or is written by a forward pass."""
        if not self._is_as_before():
            _refuse(self._changed_parameter())
            self._remember()
        for name, param in self._frozen:
            if param.requires_grad:
                _refuse(f"{name} was frozen and is not any more")
        for name, table in self._tables:
            if table.max_norm is not None:
                _refuse(f"max_norm of {name or 'it'} was set")

    def names(self) -> Mapping[int, str]:
        """Return the names of the model's present parameters by their ids."""
        return self._names if self._is_as_before() else _names(self._model)

    def _is_as_before(self) -> bool:
        now = [*chain.from_iterable(map(tuple, map(dict.values, self._dicts)))]  # another thread may own the model
        return len(now) == len(self._known) and all(map(is_, now, self._known))

    def _remember(self) -> None:
        modules = list(self._model.modules())
        # Public access would walk through all modules again: these are the dicts in which they keep their contents.
        self._dicts: list[dict[str, Any]] = [
            *(module._modules for module in modules),  # noqa: SLF001
            *(module._parameters for module in modules),  # noqa: SLF001
        ]
        self._known = [*chain.from_iterable(map(dict.values, self._dicts))]

    def _changed_parameter(self) -> str | None:
        now = _names(self._model)
        gone = (f"{name} was replaced or removed" for param, name in self._names.items() if param not in now)
        added = (f"{name} was added" for param, name in now.items() if param not in self._names)
        return next(chain(gone, added), None)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def _refuse(change: str | None) -> None:
    if change is not None:
        raise UsageError(MODEL_CHANGED.format(change=change))


class StepGuard:
    """Knows whether the gradients at hand were averaged, and which optimizers have used them.

    `take_part` is called on a rank that comes to its step without any gradient, so that the others get its zeros.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        params: Sequence[Tensor],
        take_part: Callable[[], None],
        scales: LossScales,
    ) -> None:
        self._optimizers, self._take_part, self._scales = optimizers, take_part, scales
        self._params = sorted(params, key=Tensor.numel)  # looking at the small ones first is enough in most steps
        self.held_back = False  # True after a backward pass that added to gradients without averaging them
        self._refusal = ""  # why no optimizer may step now
        self._unused_by: set[int] = set()  # optimizers that have not stepped since gradients were averaged
        self._weights = {id(each): 1 + i % 31 for i, each in enumerate(optimizers)}
        self.steps = 0
        """The sum of all steps, each with the weight of its optimizer: it shows if ranks step different optimizers."""

    def close(self, step: int) -> tuple[int, int]:
        """Refuse steps, as gradients are on their way; return what ranks compare: steps so far, digest of settings."""
        self._refusal = MIDWAY
        scales = self._scales.values() if self._scales.known else ()
        return self.steps, settings_digest(self._optimizers, step, scales)

    def restart(self, also: Iterable[object]) -> None:
        """Count steps and learn of scalers anew, but for those in `also`: ranks may have stepped different numbers."""
        self.steps = 0
        self._scales.begin(also)

    def open(self) -> None:
        """Allow each optimizer a step: all gradients have been averaged."""
        self.held_back, self._refusal = False, ""
        self._unused_by = set(self._weights)

    def drop(self) -> None:
        """Note that the gradients at hand are not to be used."""
        self.held_back, self._refusal = False, ""
        self._unused_by.clear()

    @property
    def is_due(self) -> bool:
        """True if averaged gradients are at hand for an optimizer that has not stepped with them."""
        if not self._unused_by:
            return False
        unused = (optimizer for optimizer in self._optimizers if id(optimizer) in self._unused_by)
        return not are_zeroed(param for each in unused for group in each.param_groups for param in group["params"])

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Refuse a step with other gradients than averaged ones; return its arguments if a closure makes them."""
        if self._refusal:
            raise UsageError(self._refusal)
        if are_zeroed(self._params):  # since the last backward pass: what is known is about older gradients
            self.held_back = False
            self._unused_by.clear()
        if (closure := closure_in(args, kwargs)) is not None:
            guarded = self._guarded(optimizer, closure)
            return ((args[0], guarded, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": guarded})
        if self.held_back:
            raise UsageError(UNAVERAGED)
        if id(optimizer) not in self._unused_by:
            self._take_part()
        return None

    def _guarded(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `closure`, which makes the gradients, followed by the checks that would come before it."""

        @wraps(closure)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            if self.held_back:
                raise UsageError(UNAVERAGED)
            if id(optimizer) not in self._unused_by:
                if not are_zeroed(self._params):
                    raise UsageError(
                        "optimizer.step() with a closure that made gradients which were never averaged: call "
                        "loss.backward() in it, or replica.average() after it has filled param.grad"
                    )
                self._take_part()
            return value

        return guarded

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that `optimizer` has stepped."""
        number = id(optimizer)
        self._unused_by.discard(number)
        self.steps += self._weights[number]
        self._scales.notice()
        if self.held_back:  # a closure was given, and not called
            raise UsageError(f"{UNAVERAGED}. This rank's parameters have changed already: load a checkpoint")


def are_zeroed(params: Iterable[Tensor]) -> bool:
    """Return True if no gradient has other values than zeros; one on a GPU, which would have to be waited for, has."""
    for param in params:
        grad = param.grad
        if grad is not None and (grad.is_cuda or grad.layout != torch.strided or grad.any()):
            return False
    return True


def closure_in(args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """Return the closure given to ``step(optimizer, closure)``."""
    return cast("Callable[..., Any] | None", args[1] if len(args) > 1 else kwargs.get("closure"))


def settings_digest(optimizers: Sequence[Optimizer], step: int, scales: Sequence[float] = ()) -> int:
    """Return 8 bits of all numeric settings of `optimizers`, and of `scales`, the same in every process.

    Ranks compare them in each step, since schedulers change settings. Two different settings have equal bits once in
    256 times, and other ones in another `step`: a difference that lasts is found. Numbers on a GPU are left out,
    because reading them would wait for it. Cost: 8 us for AdamW with one group.
    """
    numbers: list[Any] = [*scales]
    salt = step % (1 << WIDTHS.step)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for value in map(group.get, sorted(group.keys() - {"params"})):  # loaded ones have another order
                if type(value) in PLAIN:  # nearly all: this calls nothing
                    numbers += (value,)
                elif value is not None:
                    numbers += _numbers_in(value)
    return blake2b(pack(f"q{len(numbers)}d", salt, *numbers), digest_size=1).digest()[0]


def _numbers_in(value: object) -> list[float]:
    """Return `value`, or the values in it, if they are numbers on the host."""
    if isinstance(value, tuple | list):
        return [*chain.from_iterable(map(_numbers_in, value))]
    on_host = isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()
    return [float(value)] if on_host or isinstance(value, NUMBERS) else []  # type: ignore[arg-type]


def wrapped_as(inner: Optimizer, optimizers: Sequence[Optimizer]) -> str | None:
    """Return the attribute of one of `optimizers` that is `inner` or holds it, as text; None if there is none."""
    for outer in optimizers:
        for key, value in vars(outer).items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if any(part is inner for part in parts):
                return f"{type(outer).__name__}.{key}"
    return None
