# SPDX-License-Identifier: Apache-2.0
"""Read a model's workload for the cost model: layers in order, parameters, multiplications.

Runs the model once, on the calling thread, with hooks that it takes away again. Modes, random
numbers and torch's switch for fast attention are put back; buffers are copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from commrt.errors import UsageError
from commrt.tools.planning.workload import Layer, Workload

Batch: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
Shape: TypeAlias = Sequence[int]


class _Call(NamedTuple):
    """The begin of a module's forward pass."""

    module: nn.Module
    flops: int
    """Operations counted before it."""
    rows: int = 0
    """Rows of its input if that is a matrix, else 0."""


def workload_of(model: nn.Module, batch: Batch, name: str | None = None) -> Workload:
    """Return the workload of `model`, for ``commrt plan step --model`` and `Workload.buckets`.

    Raises `UsageError` for a model or a batch that it cannot read.

    `batch` is an example input: a tensor, a tuple of arguments, or a dict of keyword arguments. It
    lies on the model's device, which may be meta. The first dimension of its first tensor counts
    samples. `name` defaults to the class.

    The model runs once, in eval mode and without gradients. Its buffers, modes and random numbers
    stay as they are.

    A layer is a module with trainable parameters. Its work is the multiplications per sample from
    its begin to the begin of the next layer, so products without parameters belong to the layer
    before. Shared parameters count once, where they are used first. Parameters that are frozen have
    no gradient to exchange. Products of matrices, convolutions, attention and recurrent layers are
    counted, and everything else is free.

    An `nn.Linear` that runs once, with one row for each sample, also has its shape, for
    ``studies/hybrid_parallelism``.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> workload_of(model, torch.zeros(16, 4), name="mlp").layers[1].facts()
    {'numel': 18, 'work': 16.0, 'inputs': 8, 'outputs': 2}
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"workload_of() of a {type(model).__name__}: give a torch.nn.Module, then an example"
            " batch"
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile's module holds the model
    label = type(model).__name__ if name is None else name
    _require_readable(model, label)
    samples = _samples(batch, label)
    calls, flops = _run(model, batch, label)
    owners = [(call, numel) for call, numel in _fresh_numels(model, calls) if numel]
    bounds = pairwise([0, *(call.flops for call, _ in owners[1:]), flops])
    times = Counter(call.module for call in calls)
    layers = []
    for (call, numel), (begin, end) in zip(owners, bounds, strict=True):
        shape = _shape(call, samples) if times[call.module] == 1 else (None, None)
        layers.append(Layer(numel, (end - begin) / 2 / samples, *shape))
    return Workload(label, tuple(layers))


def _shape(call: _Call, samples: int) -> tuple[int | None, int | None]:
    """Return inputs and outputs of a fully connected layer that has one row for each sample."""
    module = call.module
    if isinstance(module, nn.Linear) and call.rows == samples:
        return module.in_features, module.out_features
    return None, None


def _require_readable(model: nn.Module, label: str) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError(
            f"{label} is compiled by TorchScript, which hides its layers: give the model as it was"
            " before"
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise UsageError(
            f"{label} has lazy parameters, whose sizes are not known yet: run the model once first"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{label} has no parameters that need a gradient, so there is nothing to exchange: give"
            " a model with some, or call requires_grad_() on those that you train"
        )


def _samples(batch: Batch, label: str) -> int:
    positional, named = _arguments(batch)
    values = (*positional, *named.values())
    tensor = next((each for each in values if isinstance(each, Tensor) and each.ndim), None)
    if tensor is None or not tensor.shape[0]:
        raise UsageError(
            f"the batch for {label} holds no samples: give a tensor, a tuple or a dict of tensors,"
            " with one sample at least in the first dimension"
        )
    return tensor.shape[0]


def _arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _run(model: nn.Module, batch: Batch, label: str) -> tuple[list[_Call], int]:
    """Run `model` once; return the begin of each module's forward pass, and all operations."""
    positional, named = _arguments(batch)
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    calls = [_Call(model, 0)]
    with _as_it_was(model), _recorded(model, calls, counter), counter:
        try:
            functional_call(model, buffers, positional, named)
        except Exception as error:
            raise UsageError(
                f"{label} does not take the batch ({type(error).__name__}: {error!s:.300}): give"
                " what its forward takes, on the model's device: a tensor, a tuple of arguments,"
                " or a dict of keyword arguments"
            ) from error
    return calls, counter.get_total_flops()


@contextmanager
def _recorded(model: nn.Module, calls: list[_Call], counter: FlopCounterMode) -> Iterator[None]:
    """Append to `calls` each time when a module of `model` begins."""

    def record(module: nn.Module, given: tuple[object, ...]) -> None:
        first = given[0] if given else None
        rows = first.shape[0] if isinstance(first, Tensor) and first.ndim == 2 else 0
        calls.append(_Call(module, counter.get_total_flops(), rows))

    hooks = [module.register_forward_pre_hook(record) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode without gradients; put modes and random numbers back after."""
    modes = {module: module.training for module in model.modules()}
    is_fast = torch.backends.mha.get_fastpath_enabled()
    gpus = {
        parameter.device.index
        for parameter in model.parameters()
        if parameter.device.type == "cuda"
    }
    # it is one operation, which the counter does not know
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module in modes:
            module.training = False
        with torch.random.fork_rng(devices=sorted(gpus)), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for module, mode in modes.items():
            module.training = mode


def _fresh_numels(model: nn.Module, calls: Sequence[_Call]) -> Iterator[tuple[_Call, int]]:
    """Yield each call with the number of trainable parameters that no call before it has used."""
    places = {call.module: list[nn.Module]() for call in calls}
    _place(model, model, places)
    seen = set[nn.Parameter]()
    for call in calls:
        owned = [
            each
            for module in places.pop(call.module, ())
            for each in module.parameters(recurse=False)
        ]
        fresh = {each for each in owned if each.requires_grad} - seen
        seen |= fresh
        yield call, sum(each.numel() for each in fresh)


def _place(module: nn.Module, place: nn.Module, places: dict[nn.Module, list[nn.Module]]) -> None:
    """Add `module` and all inside it to the nearest called module around it, which uses them."""
    place = module if module in places else place
    places[place].append(module)
    for child in module.children():
        _place(child, place, places)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (key[-1] + value[-1])


def _onednn_rnn_flops(
    rows: Shape, of_input: Shape, of_state: Shape, *_: object, **__: object
) -> int:
    return 2 * prod(rows[:-1]) * (prod(of_input) + prod(of_state))


def _cudnn_rnn_flops(rows: Shape, weights: Sequence[Shape], *_: object, **__: object) -> int:
    return 2 * prod(rows[:-1]) * sum(prod(weight) for weight in weights if len(weight) == 2)


UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (_attention_flops),  # noqa: SLF001  # no other name
    torch.ops.aten.mkldnn_rnn_layer: _onednn_rnn_flops,
    torch.ops.aten._cudnn_rnn: _cudnn_rnn_flops,  # noqa: SLF001  # likewise
}
"""Operations of matrices that torch's counter does not know."""
