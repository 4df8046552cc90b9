# SPDX-License-Identifier: Apache-2.0
"""Choose the backend of a kernel: Triton on a GPU for dtypes that it offers, else plain torch.

`packing` returns an object; what `adding` and the like return does the work each time it is called.
Both work on the calling thread (on a GPU on its current stream), and only on the memory that was
given. Making one imports and compiles what a GPU needs. Plain torch packs, adds and mixes integers
and fp64 on GPUs too. It also adds and mixes tensors there that do not begin at a multiple of 16
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor

from commrt.kernels.layout import WIDEST_NBYTES, Layout
from commrt.kernels.packing import Packing, Repeatable
from commrt.kernels.plain_torch import combine_into, mix_into, reduce_into
from commrt.kernels.torch_packing import TorchPacking

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the Triton kernels offer."""

TRITON_AT_LEAST = "3.5"
"""3.2 lacks functions that `device.variants` calls; 3.5 and 3.6 were tried."""

ON_GPUS = {
    "packing": "commrt.kernels.device.packing:TritonPacking",
    "add": "commrt.kernels.device.launch:add_launch",
    "mix": "commrt.kernels.device.launch:mix_launch",
    "quantize": "commrt.kernels.device.launch:quantize_launch",
    "dequantize": "commrt.kernels.device.launch:dequantize_launch",
    "add quantized": "commrt.kernels.device.launch:add_quantized_launch",
    "signal_wait": "commrt.kernels.device.launch:signal_wait_launch",
}
"""What makes the launches of each kernel; imported for the first tensor on a GPU, with Triton."""

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}
"""What ADD in a schedule may stand for: commutative and associative (floats, up to rounding)."""

Combination = Callable[[], object]
"""Runs an addition or a mix on fixed memory each time it is called."""


def on_gpu(kernel: str) -> Callable[..., Any]:
    """Return what makes the launches of `kernel`."""
    return cast("Callable[..., Any]", resolve_name(ON_GPUS[kernel]))


def packing(wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> Packing:
    """Return the compiled `Packing` on `wire` of tensors with dtype, shapes, strides of `like`."""
    if is_on_gpu(wire) and wire.dtype in GPU_DTYPES and like[0].dtype in GPU_DTYPES:
        return cast("Packing", on_gpu("packing")(wire, layout, like[0].dtype))
    return TorchPacking(wire, layout, like)


def repeatable(packing: Packing) -> Repeatable | None:
    """Return `packing` if its launches can be recorded in a CUDA graph, otherwise None."""
    return None if isinstance(packing, TorchPacking) else cast("Repeatable", packing)


def is_on_gpu(tensor: Tensor) -> bool:
    """Return True if the Triton kernels can reach `tensor`."""
    return tensor.is_cuda


def has_kernels(out: Tensor) -> bool:
    """Return True if the Triton kernels can add to `out`: by its device, dtype and address."""
    return out.dtype in GPU_DTYPES and are_reachable(out)


def are_reachable(*buffers: Tensor) -> bool:
    """Return True if the Triton kernels can work on all `buffers`: by device and address."""
    return all(is_on_gpu(buffer) and buffer.data_ptr() % WIDEST_NBYTES == 0 for buffer in buffers)


def adding(out: Tensor, summands: Sequence[Tensor]) -> Combination:
    """Return a function that computes ``out = summands[0] + ...``, of which `out` is one."""
    if has_kernels(out):
        return cast("Combination", on_gpu("add")(out, summands))
    return partial(reduce_into, out, summands)


def combining(operation: str) -> Callable[[Tensor, Sequence[Tensor]], Combination]:
    """Return what makes functions of one of `OPERATIONS`, from left to right, as `adding` does.

    The sum is that of `adding`. The others are done in plain torch, on GPUs too.
    """
    if operation == "sum":
        return adding
    function = OPERATIONS[operation]
    return lambda out, operands: partial(combine_into, function, out, operands)


def copying(out: Tensor, source: Tensor) -> Combination:
    """Return a function that copies `source` to `out`."""
    return partial(out.copy_, source)


def mixing(out: Tensor, received: Tensor, weight: float) -> Combination:
    """Return a function that computes ``out += weight * (received - out)``."""
    if has_kernels(out):
        return cast("Combination", on_gpu("mix")(out, received, weight))
    return partial(mix_into, out, received, weight)
