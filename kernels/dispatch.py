# SPDX-License-Identifier: Apache-2.0
"""The one place that decides who does the work: Triton for what is on a GPU, plain torch elsewhere.

What is summed or mixed on a GPU in a dtype that the kernels are not made for (integers, fp64) is plain torch's too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from commrt.kernels.layout import Layout
from commrt.kernels.mix import mix_into
from commrt.kernels.packing import Packing, Repeatable, TorchPacking
from commrt.kernels.reduce import reduce_into

__all__ = ["GPU_DTYPES", "TRITON_AT_LEAST", "adding", "is_too_old", "mixing", "packing", "repeatable"]

GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the Triton kernels are made for."""

TRITON_AT_LEAST = "3.5"
"""3.2 lacks what `device.variants` calls; 3.5 and 3.6 were tried."""

Combination = Callable[[], None]
"""Work on fixed memory, as often as it is called."""


def packing(wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> Packing:
    """Who moves tensors of the dtype, shapes and strides of `like` to and from `wire`; compiles what it needs.

    Raises `ValueError` for a dtype that is not offered on the wire's device.
    """
    if not is_on_gpu(wire):
        return TorchPacking(wire, layout, like)
    from commrt.kernels.device.packing import TritonPacking  # noqa: PLC0415  # Triton is there only with a GPU

    return TritonPacking(wire, layout, like[0].dtype)


def repeatable(packing: Packing) -> Repeatable | None:
    """`packing` if a device can remember its launches."""
    return None if isinstance(packing, TorchPacking) else cast("Repeatable", packing)


def is_on_gpu(tensor: Tensor) -> bool:
    """True if the Triton kernels can reach `tensor`."""
    return tensor.is_cuda


def adding(out: Tensor, received: Sequence[Tensor]) -> Combination:
    """``out += received[0] + received[1] + ...``; `received` lie evenly spaced in one buffer, one after the other."""
    if is_on_gpu(out) and out.dtype in GPU_DTYPES:
        from commrt.kernels.device.combine import add_launch  # noqa: PLC0415

        return add_launch(out, received)
    return lambda: reduce_into(out, received)


def mixing(out: Tensor, received: Tensor, weight: float) -> Combination:
    """``out += weight * (received - out)``."""
    if is_on_gpu(out) and out.dtype in GPU_DTYPES:
        from commrt.kernels.device.combine import mix_launch  # noqa: PLC0415

        return mix_launch(out, received, weight)
    return lambda: mix_into(out, received, weight)


def is_too_old(triton: str) -> bool:
    """True for a version of Triton before `TRITON_AT_LEAST`.

    >>> is_too_old("3.2.0"), is_too_old("3.6.0+git1"), is_too_old("3.10.0")
    (True, False, False)
    """
    return _numbers(triton) < _numbers(TRITON_AT_LEAST)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
