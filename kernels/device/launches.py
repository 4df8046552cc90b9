# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels on a GPU whose arguments never change: reduce and mix, quantize, and meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from commrt.kernels.device import variants
from commrt.kernels.device.launch import Bound, arch_of, launch_of, require_aligned
from commrt.kernels.device.sizes import sizes_for, tile_for
from commrt.kernels.layout import GRANULE, Layout
from commrt.kernels.meeting import MeetingPlan
from commrt.kernels.tables import Tables
from commrt.quantizer import Quantizer

__all__ = [
    "add_launch",
    "add_quantized_launch",
    "dequantize_launch",
    "meet_launch",
    "mix_launch",
    "quantize_launch",
    "spacing",
]


def add_launch(out: Tensor, received: Sequence[Tensor]) -> Bound:
    """Return a launch that computes ``out = cast(out + received[0] + ...)``; a peer's memory may be received too.

    Up to 8 received buffers need at most 64 registers, 16 need 57.
    """
    require_aligned(out, *received)
    sizes = sizes_for(arch_of(out.device), inputs=1 + len(received))
    launch = launch_of(variants.reduce(out.dtype, len(received), sizes), out.device)
    addresses = torch.tensor([part.data_ptr() for part in received], device=out.device)
    arguments = (out.data_ptr(), addresses.data_ptr(), out.data_ptr(), out.numel())
    return Bound(launch, -(-out.numel() // sizes.tile), arguments, (out, addresses, *received))


def spacing(received: Sequence[Tensor]) -> int:
    """Return the distance between two of `received` in granules; raises `ValueError` if it differs."""
    nbytes = GRANULE * received[0].element_size()
    addresses = [part.data_ptr() for part in received]
    step = addresses[1] - addresses[0] if len(addresses) > 1 else 0
    if step % nbytes or any(there - here != step for here, there in pairwise(addresses)):
        raise ValueError(
            f"received buffers must lie evenly, a multiple of {nbytes} bytes apart: they are at {addresses}"
        )
    return step // nbytes


def mix_launch(out: Tensor, received: Tensor, weight: float) -> Bound:
    """Return a launch that computes ``out = cast(out + weight * (received - out))``."""
    require_aligned(out, received)
    arch = arch_of(out.device)
    tables = Tables(Layout((out.numel(),), (0,), out.numel()), tile_for(arch), out.device)
    tables.point_at([out])
    variant = variants.mix(out.dtype, out.dtype, tables.align, sizes_for(arch, 3, tables.align))
    factor = torch.full((1,), weight, device=out.device)
    arguments = (
        *(column.data_ptr() for column in tables.columns),
        received.data_ptr(),
        out.data_ptr(),
        factor.data_ptr(),
    )
    return Bound(launch_of(variant, out.device), tables.tiles, arguments, (tables, factor, out, received))


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


def meet_launch(plan: MeetingPlan) -> Bound:
    """Return a launch of the meeting of `plan`; see `meet_kernel`."""
    device, peers = plan.state.device, len(plan.needs)
    rows = (plan.outboxes, plan.inboxes, plan.counts)
    tables = [torch.tensor([word.data_ptr() for word in row], device=device) for row in rows]
    needs = torch.tensor([*plan.needs, *plan.ranks], dtype=torch.int32, device=device)
    memory = (*tables, needs, plan.state, plan.host)
    arguments = (*(part.data_ptr() for part in memory), plan.position, plan.last, plan.number, int(plan.looks))
    return Bound(launch_of(variants.meet(peers), device), 1, arguments, (*memory, *rows))
