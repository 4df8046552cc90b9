# SPDX-License-Identifier: Apache-2.0
"""How the kernels are cut, for each architecture."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Sizes", "sizes_for", "tile_for"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a kernel is cut."""

    tile: int
    """Elements of a program."""
    warps: int


SIZES = {80: Sizes(4096, 4), 90: Sizes(4096, 4), 100: Sizes(4096, 4)}
"""For aligned tensors, by compute capability (90 is 9.0); `bench/tune_kernels.py` prints this table.

From registers and bytes in flight of the compiled kernels. No GPU has been asked yet.
"""


def tile_for(arch: int) -> int:
    """Elements of a tile on `arch`."""
    return _of(arch).tile


def sizes_for(arch: int, inputs: int = 1, align: int = 16) -> Sizes:
    """For a kernel that reads `inputs` values per element, of tensors aligned to `align` bytes.

    Twice or four times the warps where a thread would need more than 64 registers, or spill: with many inputs, or
    narrow accesses. The bounds are those at which `bench/inspect_kernels.py` found that.
    """
    sizes, accesses = _of(arch), inputs * (16 // align)  # for 16 bytes of each input
    times = 4 if inputs > 6 or accesses > 12 else 2 if accesses > 3 else 1
    return Sizes(sizes.tile, sizes.warps * times)


def _of(arch: int) -> Sizes:
    """The sizes of `arch`, or of the nearest older one that is known."""
    return SIZES[max((older for older in SIZES if older <= arch), default=min(SIZES))]
