# SPDX-License-Identifier: Apache-2.0
"""How the kernels are cut, for each architecture."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes", "sizes_for", "tile_for"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a kernel is cut."""

    tile: int
    """Elements of a program."""
    warps: int


TILES = {80: 4096, 90: 4096, 100: 4096}
"""Elements of a tile of a tensor, by compute capability. From registers and bytes in flight; not measured on a GPU."""


def tile_for(arch: int) -> int:
    """What `arch` (90 is compute capability 9.0), or the nearest older one that is known, works on at once."""
    known = [older for older in TILES if older <= arch]
    return TILES[max(known, default=min(TILES))]


def sizes_for(arch: int, inputs: int = 1, align: int = 16) -> Sizes:
    """For a kernel that reads `inputs` values per element, of tensors aligned to `align` bytes.

    Twice the warps where a thread would need more than 64 registers: with many inputs, or narrow accesses.
    """
    return Sizes(tile_for(arch), 8 if inputs * (16 // align) > 3 else 4)
