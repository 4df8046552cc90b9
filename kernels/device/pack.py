# SPDX-License-Identifier: Apache-2.0
"""Pack: many tensors into one wire buffer.

A program per tile of `commrt.kernels.tables`, which writes its part of the wire, and of the head.
Arguments are the columns of `Tables`, a wire of its layout, the header (its address, if `HELD`) and
where the scale is; `device.variants` compiles for those in capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.header import store_header
from commrt.kernels.device.tiles import lanes, on_wire, pointer, tile_of, whole_of


@triton.jit
def pack_kernel(
    addresses,
    tensors,
    numbers,
    counts,
    offsets,
    wire,
    header,
    scale,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
):
    """A tile of a tensor times ``scale[0]``, cast, to its offset on `wire`; zeros for address 0."""
    tensor, first, count = tile_of(tensors, numbers, counts, TILE)
    address = tl.load(addresses + tensor)
    source = pointer(address, first, DTYPE, ALIGN)
    target = on_wire(wire, offsets)
    factor = tl.where(address != 0, tl.load(scale), 0.0)  # or zeros would become -0.0, or NaN
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    # one comparison per access, where `and` would be two
    readable = tl.where(address != 0, whole, 0)
    values = tl.load(source + element, mask=element < readable, other=0.0)
    scaled = values.to(tl.float32) * factor
    tl.store(target + element, scaled.to(wire.dtype.element_ty), mask=element < whole)
    if whole < count:
        left = whole + tl.arange(0, 8)
        there = (left < count) & (address != 0)
        tail = tl.load(source + left, mask=there, other=0.0).to(tl.float32) * factor
        tl.store(target + left, tail.to(wire.dtype.element_ty), mask=left < count)
    store_header(wire, tl.load(header) if HELD else header, tensor, first, address)
