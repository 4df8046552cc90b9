# SPDX-License-Identifier: Apache-2.0
"""Code, decode and add codes on a GPU: one launch each, with arguments that never change, but for the key."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from commrt.kernels.device import variants
from commrt.kernels.device.combine import spacing
from commrt.kernels.device.launch import Bound, launch_of, require_aligned
from commrt.quantizer import Quantizer

__all__ = ["add_quantized_launch", "dequantize_launch", "quantize_launch"]


def quantize_launch(
    values: Tensor, codes: Tensor, quantizer: Quantizer, residual: Tensor | None
) -> Callable[[int], None]:
    """Return a launch, given the key of random numbers, that codes `values` and keeps what is lost in `residual`."""
    left = values if residual is None else residual  # not touched without feedback
    require_aligned(values, codes, left)
    launch = launch_of(variants.quantize(quantizer, feedback=residual is not None), values.device)
    arguments = (values.data_ptr(), left.data_ptr(), codes.data_ptr(), values.numel())
    bound = Bound(launch, _tiles(values, quantizer), arguments, (values, codes, left))
    return lambda key: bound.launch(bound.programs, *bound.arguments, key)


def dequantize_launch(codes: Tensor, values: Tensor, quantizer: Quantizer) -> Bound:
    """Return a launch that dequantizes to `values`."""
    require_aligned(values, codes)
    launch = launch_of(variants.dequantize(quantizer), values.device)
    arguments = (codes.data_ptr(), values.data_ptr(), values.numel())
    return Bound(launch, _tiles(values, quantizer), arguments, (codes, values))


def add_quantized_launch(values: Tensor, received: Sequence[Tensor], quantizer: Quantizer) -> Bound:
    """Return a launch that adds what `received` codes stand for; they are evenly spaced in memory."""
    require_aligned(values, *received)
    launch = launch_of(variants.add_quantized(quantizer), values.device)
    arguments = (values.data_ptr(), received[0].data_ptr(), spacing(received), len(received), values.numel())
    return Bound(launch, _tiles(values, quantizer), arguments, (values, *received))


def _tiles(values: Tensor, quantizer: Quantizer) -> int:
    return -(-values.numel() // quantizer.tile_numel)
