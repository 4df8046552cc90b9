# SPDX-License-Identifier: Apache-2.0
"""Pack: many tensors into one wire buffer."""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.tiles import (
    lanes,
    note_nonfinite,
    on_wire,
    pointer,
    square_sums,
    store_header,
    store_sums,
    tile_of,
    whole_of,
)


@triton.jit
def pack_kernel(
    addresses,
    tensors,
    numbers,
    counts,
    places,
    wire,
    header,
    scale,
    nonfinite,
    sums,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    NONFINITE: tl.constexpr,
    SUMS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """A tile of a tensor, times ``scale[0]``, cast, to its place on `wire`; zeros where the address is 0."""
    tensor, first, count = tile_of(tensors, numbers, counts, TILE)
    address = tl.load(addresses + tensor)
    source = pointer(address, first, DTYPE, ALIGN)
    target = on_wire(wire, places)
    factor = tl.where(address != 0, tl.load(scale), 0.0)  # or zeros would become -0.0, or NaN
    if NONFINITE or SUMS:
        factor = tl.where(count != 0, factor, 0.0)  # in an empty tensor nothing is found
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    readable = tl.where(address != 0, whole, 0)  # one comparison per access, where `and` would be two
    values = tl.load(source + element, mask=element < readable, other=0.0, eviction_policy=EVICT)
    scaled = values.to(tl.float32) * factor
    tl.store(target + element, scaled.to(wire.dtype.element_ty), mask=element < whole)
    if NONFINITE:
        note_nonfinite(nonfinite, scaled, VECTOR, WARPS)
    if SUMS:
        total = square_sums(scaled, VECTOR, WARPS) + 0.0 * factor  # NaN where it is not finite, in any tile
    if whole < count:
        left = whole + tl.arange(0, 8)
        tail = tl.load(source + left, mask=(left < count) & (address != 0), other=0.0).to(tl.float32) * factor
        tl.store(target + left, tail.to(wire.dtype.element_ty), mask=left < count)
        if NONFINITE:
            tl.store(nonfinite + left * 0, 1, mask=~(tl.abs(tail) < float("inf")))
        if SUMS:
            thread = tl.arange(0, WARPS * 32)
            total += tl.where(thread == 0, tl.sum(tail * tail), 0.0)
    if SUMS:
        store_sums(sums, total, WARPS)
    store_header(wire, tl.load(header) if HELD else header, tensor, first, address)
