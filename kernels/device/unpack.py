# SPDX-License-Identifier: Apache-2.0
"""Unpack: one wire buffer into many tensors.

A program per tile of `commrt.kernels.tables`, which writes to its tensor; the first one also tells
the host, by 1 in `mismatch`, if the wire has another header. Arguments are the columns of `Tables`,
a wire of its layout, the header (its address, if `HELD`) and that word of the host;
`device.variants` compiles for those in capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.header import note_mismatch
from commrt.kernels.device.tiles import lanes, on_wire, pointer, tile_of, whole_of


@triton.jit
def unpack_kernel(
    addresses,
    tensors,
    numbers,
    counts,
    offsets,
    wire,
    header,
    mismatch,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
):
    """A tile of a tensor from its offset on `wire`, cast; none where the address is 0."""
    tensor, first, count = tile_of(tensors, numbers, counts, TILE)
    address = tl.load(addresses + tensor)
    count = tl.where(address != 0, count, 0)
    target = pointer(address, first, DTYPE, ALIGN)
    source = on_wire(wire, offsets)
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    inside = element < whole
    values = tl.load(source + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + element, values.to(DTYPE), mask=inside)
    if whole < count:
        left = whole + tl.arange(0, 8)
        there = left < count
        tail = tl.load(source + left, mask=there, other=0.0).to(tl.float32)
        tl.store(target + left, tail.to(DTYPE), mask=there)
    note_mismatch(mismatch, wire, tl.load(header) if HELD else header)
