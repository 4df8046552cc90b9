# SPDX-License-Identifier: Apache-2.0
"""Unpack: one wire buffer into many tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.tiles import (
    lanes,
    note_mismatch,
    on_wire,
    pointer,
    square_sums,
    store_sums,
    tile_of,
    whole_of,
)


@triton.jit
def unpack_kernel(
    addresses,
    tensors,
    numbers,
    counts,
    places,
    wire,
    header,
    mismatch,
    scale,
    sums,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    HELD: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SUMS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """A tile of a tensor from its place on `wire`, times ``scale[0]``, cast or added; none where the address is 0."""
    tensor, first, count = tile_of(tensors, numbers, counts, TILE)
    address = tl.load(addresses + tensor)
    count = tl.where(address != 0, count, 0)
    target = pointer(address, first, DTYPE, ALIGN)
    source = on_wire(wire, places)
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    inside = element < whole
    values = tl.load(source + element, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if SCALED:
        values *= _factor(scale, count, SUMS)
    if ACCUMULATE:
        values += tl.load(target + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + element, values.to(DTYPE), mask=inside)
    if SUMS:
        total = square_sums(values, VECTOR, WARPS)
        if SCALED:
            total += 0.0 * _factor(scale, count, SUMS)  # NaN where it is not finite, in any tile
    if whole < count:
        left = whole + tl.arange(0, 8)
        there = left < count
        tail = tl.load(source + left, mask=there, other=0.0).to(tl.float32)
        if SCALED:
            tail *= _factor(scale, count, SUMS)
        if ACCUMULATE:
            tail += tl.load(target + left, mask=there, other=0.0).to(tl.float32)
        tl.store(target + left, tail.to(DTYPE), mask=there)
        if SUMS:
            total += tl.where(tl.arange(0, WARPS * 32) == 0, tl.sum(tail * tail), 0.0)
    if SUMS:
        store_sums(sums, total, WARPS)
    note_mismatch(mismatch, wire, tl.load(header) if HELD else header)


@triton.jit
def _factor(scale, count, SUMS: tl.constexpr):
    """``scale[0]``; where sums are formed 0 for a tile in which nothing is stored, or its sums would be NaN."""
    return tl.where(count != 0, tl.load(scale), 0.0) if SUMS else tl.load(scale)
