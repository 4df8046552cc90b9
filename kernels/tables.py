# SPDX-License-Identifier: Apache-2.0
"""Tables in GPU memory that tell one kernel where many tensors lie; only addresses change.

One thread at a time uses a table, with the stream on which it launches as the current one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from commrt.kernels.layout import GRANULE, WIDEST_NBYTES, Layout, refuse_count

IntArray = NDArray[np.integer[Any]]

EMPTY = WIDEST_NBYTES
"""Address of an empty tensor, never accessed; torch's 0 marks an absent one."""


def alignment(addresses: Sequence[int]) -> int:
    """Return the largest power of two up to 16 that divides all `addresses`.

    >>> alignment([64, 32]), alignment([64, 40]), alignment([64, 2]), alignment([])
    (16, 8, 2, 16)
    """
    together = WIDEST_NBYTES
    for address in addresses:
        together |= address
    return together & -together


class Tables:
    """Tables of the tensors of one wire, tile by tile; cost 8 bytes per tensor and 16 per tile.

    `point_at` alone changes what is public here.
    """

    def __init__(self, layout: Layout, tile: int, device: torch.device) -> None:
        sizes = np.array(layout.counts, np.int64)
        # an empty tensor has one tile too, to set its flag
        tiles = np.maximum(-(-sizes // tile), 1)
        owners = np.repeat(np.arange(len(sizes)), tiles)
        numbers = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        counts = np.minimum(sizes[owners] - numbers * tile, tile)
        offsets = (np.array(layout.offsets, np.int64)[owners] + numbers * tile) // GRANULE
        of_tiles = (
            torch.from_numpy(column.astype(np.int32))
            for column in (owners, numbers, counts, offsets)
        )
        self._offsets = offsets
        self.addresses = torch.zeros(len(sizes), dtype=torch.int64, device=device)
        """[tensors] 0 for an absent tensor."""
        self.columns = (self.addresses, *(column.to(device) for column in of_tiles))
        """Addresses; int32 [tiles]: tensor, tile number, elements, wire offset in granules."""
        self.tiles = int(tiles.sum())
        """Number of programs of a kernel."""
        self.align = WIDEST_NBYTES
        """The largest power of two up to 16 that divides all addresses."""
        self._known = [0] * len(sizes)
        self._staging: deque[Staging] = deque()

    def cut(self, chunks: int, numel: int) -> list[int]:
        """Return bounds [chunks + 1] that cut a wire of `numel` about evenly, each at a tile."""
        starts = np.sort(self._offsets) * GRANULE
        nearest = np.searchsorted(starts, [numel * chunk // chunks for chunk in range(1, chunks)])
        return [0, *np.append(starts, numel)[nearest].tolist(), numel]

    def offsets_in(self, wire: Tensor, parts: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        """Return a column of offsets, int64 [tiles], of which some are in other memory than `wire`.

        Of each of `parts`, (memory, begin, end), elements [begin, end) lie in `memory`, and begin
        and end at tiles.
        """
        offsets = self._offsets.copy()
        granule = GRANULE * wire.element_size()
        for memory, begin, end in parts:
            inside = (begin <= self._offsets * GRANULE) & (self._offsets * GRANULE < end)
            distance = memory.data_ptr() - begin * wire.element_size() - wire.data_ptr()
            if distance % granule:
                raise ValueError(
                    f"memory at {memory.data_ptr():#x} is not a multiple of {granule} bytes from"
                    " the wire"
                )
            offsets[inside] += distance // granule
        return torch.from_numpy(offsets).to(self.addresses.device)

    def point_at(self, tensors: Sequence[Tensor | None]) -> None:
        """Update the addresses to those of `tensors`.

        Costs 0.1 us per tensor, and one small copy in stream order if an address has changed since
        the last call. Raises `ValueError` for another number of tensors than the wire has.
        """
        if len(tensors) != len(self._known):
            refuse_count(tensors, len(self._known))
        now = [0 if tensor is None else tensor.data_ptr() or EMPTY for tensor in tensors]
        if now != self._known:
            if len(self._staging) < STAGINGS:
                self._staging.append(Staging(self.addresses))
            self._staging.rotate()
            self._staging[0].send(now)
            self._known = now
            self.align = alignment(now)


STAGINGS = 2
"""With two, the host rarely waits for an earlier copy."""


class Staging:
    """Pinned memory from which addresses are copied to `column`."""

    def __init__(self, column: Tensor) -> None:
        self._column = column
        self._pinned = torch.empty_like(column, device="cpu", pin_memory=column.is_cuda)
        self._sent = torch.cuda.Event() if column.is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, addresses: list[int]) -> None:
        """Copy `addresses` on the current stream; waits until the copy before is complete."""
        if self._sent is not None:
            self._sent.synchronize()
        self._pinned.numpy()[:] = addresses
        self._column.copy_(self._pinned, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
