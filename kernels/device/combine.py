# SPDX-License-Identifier: Apache-2.0
"""Reduce and mix a received buffer on a GPU: one launch each, with arguments that never change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from commrt.kernels.device import variants
from commrt.kernels.device.launch import Bound, arch_of, launch_of, require_aligned
from commrt.kernels.device.sizes import sizes_for, tile_for
from commrt.kernels.layout import GRANULE, Layout
from commrt.kernels.tables import Tables

__all__ = ["add_launch", "mix_launch", "spacing"]


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
    variant = variants.mix(out.dtype, out.dtype, tables.align, sizes_for(arch, 2, tables.align), sent=False)
    factor = torch.full((1,), weight, device=out.device)
    arguments = (*(column.data_ptr() for column in tables.columns), received.data_ptr(), 0, factor.data_ptr())
    return Bound(launch_of(variant, out.device), tables.tiles, arguments, (tables, factor, out, received))
