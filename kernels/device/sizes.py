# SPDX-License-Identifier: Apache-2.0
"""Tile size and warps of the kernels, for each GPU architecture."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Sizes", "sizes_for", "tile_for"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a kernel."""

    tile: int
    """Elements per program."""
    warps: int


SIZES = {80: Sizes(4096, 4), 90: Sizes(4096, 4), 100: Sizes(4096, 4)}
"""Sizes for aligned tensors, by compute capability (90 is 9.0); `bench/tune_kernels.py` prints this table.

Chosen by registers and bytes in flight of the compiled kernels. On an H100, no other size is more than 2 % faster for
all of ResNet-50's gradients, or more than 4 % for one of its buckets; 80 and 100 were not measured.
"""


def tile_for(arch: int) -> int:
    """Return the number of elements of a tile on `arch`."""
    return _of(arch).tile


def sizes_for(arch: int, inputs: int = 1, align: int = 16) -> Sizes:
    """Return the sizes of a kernel that reads `inputs` values per element, of tensors aligned to `align` bytes.

    With many inputs or narrow accesses there are twice or four times the warps, or a thread would need more than 64
    registers, or spill. `bench/inspect_kernels.py` found the bounds.
    """
    sizes, accesses = _of(arch), inputs * (16 // align)  # for 16 bytes of each input
    times = 4 if inputs > 6 or accesses > 12 else 2 if accesses > 3 else 1
    return Sizes(sizes.tile, sizes.warps * times)


def _of(arch: int) -> Sizes:
    """Return the sizes of `arch`, or of the nearest older architecture in the table."""
    return SIZES[max((older for older in SIZES if older <= arch), default=min(SIZES))]
