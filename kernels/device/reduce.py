# SPDX-License-Identifier: Apache-2.0
"""Reduce: add buffers up, some of which may lie in peers' memory.

A program per tile, which writes to its part of `out` only. Arguments are the first buffer, where
the addresses of the others are, the target and its elements; `device.variants` compiles for those
in capitals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.device.tiles import lanes, pointer, whole_of


@triton.jit
def _sum(head, rest, first, offset, mask, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """``head + rest[0] + ...`` at `offset`, from left to right in fp32."""
    total = tl.load(head + offset, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(COUNT):
        theirs = pointer(tl.load(rest + number), first, DTYPE, 16)
        total += tl.load(theirs + offset, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def reduce_kernel(
    head,
    rest,
    out,
    count,
    COUNT: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of ``out = cast(head + rest[0] + ...)``; `rest` [COUNT]: addresses, 16-byte aligned.

    `out` may be one of the summands.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(count - first, TILE).to(tl.int32)
    head += first
    out += first
    element = lanes(TILE, VECTOR)
    whole = whole_of(count)
    inside = element < whole
    total = _sum(head, rest, first, element, inside, COUNT, DTYPE)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=inside)
    if whole < count:
        left = whole + tl.arange(0, 8)
        tail = _sum(head, rest, first, left, left < count, COUNT, DTYPE)
        tl.store(out + left, tail.to(out.dtype.element_ty), mask=left < count)
