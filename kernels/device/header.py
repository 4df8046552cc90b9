# SPDX-License-Identifier: Apache-2.0
"""The head of a wire: packing writes the header and the flags of tensors, unpacking compares.

Only programs of first tiles touch it: of a tensor for its flag, of all for the header. `tensor`,
`first` and `address` say which tile it is, as `tiles.tile_of` and the tables do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commrt.kernels.layout import HEADER_NUMEL

HEADER = tl.constexpr(HEADER_NUMEL)


@triton.jit
def is_set(word, bit):
    """Which of the numbered bits of `word` are set."""
    return ((word >> bit) & 1) != 0


@triton.jit
def store_header(wire, header, tensor, first, address):
    """This tensor's flag, by its first tile; and the bits of `header`, by the first tile of all."""
    if first == 0:
        tl.store(wire + HEADER + tensor, tl.where(address != 0, 1.0, 0.0).to(wire.dtype.element_ty))
    if tl.program_id(0) == 0:
        bit = tl.arange(0, HEADER)
        tl.store(wire + bit, tl.where(is_set(header, bit), 1.0, 0.0).to(wire.dtype.element_ty))


@triton.jit
def note_mismatch(mismatch, wire, header):
    """By the first tile of all, set `mismatch` if the wire's header is not `header`, bit by bit."""
    if tl.program_id(0) == 0:
        bit = tl.arange(0, HEADER)
        there = tl.load(wire + bit).to(tl.float32) != 0.0
        tl.store(mismatch + bit * 0, 1, mask=there != is_set(header, bit))
