# SPDX-License-Identifier: Apache-2.0
"""Tables that tell one kernel where many tensors lie: built once, except for the addresses.

A tensor's place on the wire is a multiple of 16 elements, so that accesses of 16 bytes stay aligned in every dtype;
what lies between two places is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["GRANULE", "Tables", "alignment", "build_tables", "places_of"]

GRANULE = 16
"""Elements between possible places on the wire."""
WIDEST_NBYTES = 16
"""The widest access of a thread."""


def places_of(counts: Sequence[int]) -> list[int]:
    """The first element of each of `counts` elements on the wire, and the wire's length.

    >>> places_of([5, 0, 16, 17])
    [0, 16, 16, 32, 64]
    """
    return [0, *accumulate(-(-count // GRANULE) * GRANULE for count in counts)]


def alignment(addresses: Sequence[int]) -> int:
    """The largest power of two up to 16 that divides all `addresses`.

    >>> alignment([64, 32]), alignment([64, 40]), alignment([64, 2]), alignment([])
    (16, 8, 2, 16)
    """
    together = WIDEST_NBYTES
    for address in addresses:
        together |= address
    return together & -together


@dataclass(slots=True, eq=False)
class Tables:
    """Where the tensors of one wire buffer are, in a device's memory."""

    addresses: Tensor
    """int64 [tensors], 0 for one that is absent."""
    counts: Tensor
    """int64 [tensors], elements."""
    places: Tensor
    """int64 [tensors], in `GRANULE` elements."""
    tile_tensors: Tensor
    """int32 [tiles], which tensor a tile belongs to."""
    tile_numbers: Tensor
    """int32 [tiles], which tile of its tensor it is."""
    uploads: int = 0
    """How often the addresses have been sent to the device."""
    _known: list[int] = field(default_factory=list)
    _staging: Tensor | None = None

    @property
    def tiles(self) -> int:
        """How many programs a kernel needs."""
        return len(self.tile_tensors)

    def point_at(self, tensors: Sequence[Tensor | None]) -> int:
        """Make the tables say where `tensors` are now, and give their common alignment in bytes.

        Costs 0.1 us per tensor, and one small copy in stream order if an address has changed since the last time.
        """
        now = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if now != self._known:
            self._upload(now)
        return alignment(now)

    def _upload(self, addresses: list[int]) -> None:
        if self._staging is None:
            self._staging = torch.empty_like(self.addresses, device="cpu", pin_memory=self.addresses.is_cuda)
        elif self.addresses.is_cuda:
            torch.cuda.current_stream(self.addresses.device).synchronize()  # the last copy may still read it
        self._staging.copy_(torch.tensor(addresses))
        self.addresses.copy_(self._staging, non_blocking=True)
        self._known = addresses
        self.uploads += 1


def build_tables(counts: Sequence[int], tile: int, device: torch.device) -> Tables:
    """Tables of tensors of `counts` elements in tiles of `tile`; no addresses yet."""
    sizes = np.array(counts, np.int64)
    tiles = -(-sizes // tile)
    firsts = np.cumsum(tiles) - tiles
    columns: list[np.ndarray[Any, Any]] = [
        np.zeros(len(sizes), np.int64),
        sizes,
        np.array(places_of(counts)[:-1], np.int64) // GRANULE,
        np.repeat(np.arange(len(sizes), dtype=np.int32), tiles),
        (np.arange(tiles.sum()) - np.repeat(firsts, tiles)).astype(np.int32),
    ]
    addresses, numels, places, owners, numbers = (torch.from_numpy(column).to(device) for column in columns)
    return Tables(addresses, numels, places, owners, numbers)
