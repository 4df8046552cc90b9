# SPDX-License-Identifier: Apache-2.0
"""How kernels find a tile of a tensor, by tables or addresses, and access it 16 bytes at a time.

A program works on one tile of one tensor. Its elements are all up to a multiple of 8, under a mask
the compiler knows to be one (so it keeps wide accesses), and then up to 7 that are left, the tail.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.layout import GRANULE

GRAIN = tl.constexpr(GRANULE)


@triton.jit
def tile_of(tensors, numbers, counts, TILE: tl.constexpr):
    """Whose tile this program's is, with which element it begins, and how many it has."""
    tile = tl.program_id(0)
    return (
        tl.load(tensors + tile),
        tl.load(numbers + tile).to(tl.int64) * TILE,
        tl.load(counts + tile),
    )


@triton.jit
def pointer(address, first, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer to element `first` of what lies at `address`, a multiple of `ALIGN` bytes."""
    start = address + first * (DTYPE.primitive_bitwidth // 8)
    # the cast would drop an earlier hint
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), ALIGN)


@triton.jit
def on_wire(wire, offsets):
    """A pointer to this program's tile on the wire."""
    return tl.multiple_of(wire + tl.load(offsets + tl.program_id(0)).to(tl.int64) * GRAIN, GRAIN)


@triton.jit
def lanes(TILE: tl.constexpr, VECTOR: tl.constexpr):
    """The elements of a tile, of which a thread takes `VECTOR` at once."""
    return tl.max_contiguous(tl.arange(0, TILE), VECTOR)


@triton.jit
def whole_of(count):
    """`count` without the tail: a multiple of 8, which the compiler can tell."""
    return (count // 8) * 8
