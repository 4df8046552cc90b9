# SPDX-License-Identifier: Apache-2.0
"""Norm: the root of a sum of partial sums, always added in the same order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(sums, count, out, TILE: tl.constexpr):
    """``out[0] = sqrt(sums[0] + ... + sums[count - 1])``, by one program, in fp64."""
    total = tl.zeros([TILE], tl.float64)
    first = 0
    while first < count:  # the interpreter cannot count to an argument
        index = first + tl.arange(0, TILE)
        total += tl.load(sums + index, mask=index < count, other=0.0).to(tl.float64)
        first += TILE
    tl.store(out, tl.sqrt(tl.sum(total)).to(tl.float32))
