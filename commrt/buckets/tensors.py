# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that travel: which they are, of what kind, and as what they travel.

It looks at models and writes nothing; frozen data and functions, for any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from commrt.errors import UsageError
from commrt.runtime.wire import AnyWire, buffer_dtype, is_quantized, travels_as

AVERAGED_BUFFERS = ("running_mean", "running_var")
"""Names of the buffers of which replicas take the mean: the statistics of torch's norms."""
MODEL_CHANGED = "the model has changed since attach(), {change}: detach() and attach() again"
REPLACED = MODEL_CHANGED.format(change="{name} was replaced or removed")

Named = tuple[str, nn.Parameter]
"""A parameter and its name in the model."""


class TensorSlot(NamedTuple):
    """The place where a model keeps a tensor; what lies there may be replaced."""

    name: str
    module: nn.Module
    key: str
    is_buffer: bool

    @property
    def place(self) -> Mapping[str, Tensor | None]:
        """The dict in which the module keeps it, by its key."""
        return self.module._buffers if self.is_buffer else self.module._parameters  # noqa: SLF001

    def tensor(self) -> Tensor:
        """Return what lies there now, to be read and written without autograd."""
        tensor = (self.module._buffers if self.is_buffer else self.module._parameters).get(self.key)  # noqa: SLF001
        if tensor is None:
            raise UsageError(REPLACED.format(name=self.name))
        # A graph saves what BatchNorm counts while it trains, and does not read it: autograd need
        # not notice the write.
        is_unread = self.is_buffer and isinstance(self.module, _BatchNorm) and self.module.training
        return tensor.data if is_unread else tensor.detach()


def exchanged_tensors(model: nn.Module) -> list[TensorSlot]:
    """Return the trainable parameters and `AVERAGED_BUFFERS`, each once, in the order of the
    modules.

    Other buffers (masks, counters, the vectors of a spectral norm, codebooks) have no meaningful
    mean.
    """
    found: dict[int, TensorSlot] = {}
    for prefix, module in model.named_modules():
        for key, tensor in chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        ):
            is_buffer = key in module._buffers  # noqa: SLF001
            if (
                key in AVERAGED_BUFFERS and tensor.is_floating_point()
                if is_buffer
                else tensor.requires_grad
            ):
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(tensor), TensorSlot(name, module, key, is_buffer))
    return [*found.values()]


class TensorKind(NamedTuple):
    """Dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """Return that of `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor.stride())

    def lies_like(self, strides: tuple[int, ...]) -> bool:
        """Return True if `strides` lead to the same places in memory; strides of dimensions of size
        1 do not matter.
        """
        pairs = zip(self.shape, self.strides, strides, strict=True)
        return self.shape.numel() == 0 or all(
            size == 1 or own == other for size, own, other in pairs
        )

    def __str__(self) -> str:
        contiguous = (
            tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1] if self.shape else ()
        )
        strides = "" if self.lies_like(contiguous) else f" with strides {self.strides}"
        return f"{str(self.dtype)[6:]}{list(self.shape)}{strides}"


def bucket_description(
    index: int, wire: AnyWire, names: Iterable[str], kinds: Iterable[TensorKind]
) -> str:
    """Return everything about a bucket that must agree between ranks, as text."""
    members = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    travels = repr(wire) if is_quantized(wire) else str(wire)[6:]
    return f"bucket {index} ({travels}): {members}"


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the gradients of `param`;
    recent versions of torch let users choose it.
    """
    chosen: torch.dtype | None = getattr(param, "grad_dtype", None)
    return param.dtype if chosen is None else chosen


def wire_dtype(own: torch.dtype, wire: AnyWire | None) -> torch.dtype:
    """Return the dtype of a wire buffer for values of dtype `own`: the narrower one; fp32 if it is
    quantized.
    """
    return buffer_dtype(travels_as(own, wire))
