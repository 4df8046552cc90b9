# SPDX-License-Identifier: Apache-2.0
"""Mix: move many tensors towards what a peer sent.

A program per tile of `commrt.kernels.tables`, which writes to its tensor only. Arguments are the
columns of `Tables`, two wires of its layout, and where the weight is; `device.variants` compiles
for those in capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.tiles import lanes, on_wire, pointer, tile_of, whole_of


@triton.jit
def mix_kernel(
    addresses,
    tensors,
    numbers,
    counts,
    offsets,
    received,
    sent,
    weight,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of ``own += weight[0] * (received - sent)``; none where the address is 0."""
    tensor, first, count = tile_of(tensors, numbers, counts, TILE)
    address = tl.load(addresses + tensor)
    count = tl.where(address != 0, count, 0)
    own = pointer(address, first, DTYPE, ALIGN)
    theirs = on_wire(received, offsets)
    ours = on_wire(sent, offsets)
    factor = tl.load(weight)
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    _mix(own, theirs, ours, factor, element, element < whole)
    if whole < count:
        left = whole + tl.arange(0, 8)
        _mix(own, theirs, ours, factor, left, left < count)


@triton.jit
def _mix(own, theirs, ours, factor, offset, mask):
    before = tl.load(own + offset, mask=mask, other=0.0).to(tl.float32)
    came = tl.load(theirs + offset, mask=mask, other=0.0).to(tl.float32)
    went = tl.load(ours + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(own + offset, (before + factor * (came - went)).to(own.dtype.element_ty), mask=mask)
