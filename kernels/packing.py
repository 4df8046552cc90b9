# SPDX-License-Identifier: Apache-2.0
"""One wire buffer and the tensors that travel in it: what a backend offers, and the one of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from commrt.kernels.layout import Layout
from commrt.kernels.mix import mix
from commrt.kernels.pack import pack
from commrt.kernels.unpack import unpack

__all__ = ["Packing", "TorchPacking", "bits"]


class Packing(Protocol):
    """Moves tensors to and from their places on one wire.

    Tensors come in the order of the layout, None for one that is absent; they may change from call to call, but
    not their dtypes, shapes and strides. On a GPU all work is queued on the current stream.
    """

    @property
    def disputed(self) -> bool:
        """True once `unpack` has met a stamp that was not the own one; on a GPU it shows when the kernel has run."""
        ...

    def pack(self, tensors: Sequence[Tensor | None], scale: float, stamp: int) -> None:
        """Tensors times `scale` to their places, zeros for None; flags; a 1 for each bit set in `stamp`."""
        ...

    def present(self) -> list[bool]:
        """Which tensors somebody had; waits for the wire."""
        ...

    def unpack(self, tensors: Sequence[Tensor | None], stamp: int) -> None:
        """Places into tensors, unless what is not 0 in the wire's stamp differs from `stamp`."""
        ...

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor | None, weight: float) -> None:
        """``tensor += weight * (received - sent)``, both wires of this layout and dtype; None: as they are."""
        ...


class TorchPacking:
    """`Packing` in plain torch: one call per tensor, on any device."""

    def __init__(self, wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> None:
        self._layout, self._like = layout, like
        self._views = self._views_of(wire)
        self._flags, self._stamp = layout.flags(wire), layout.stamp(wire)
        self.disputed = False

    def pack(self, tensors: Sequence[Tensor | None], scale: float, stamp: int) -> None:
        """Costs two passes over nothing but flags and absent tensors besides the one over the tensors."""
        pack(tensors, self._views, scale)
        self._flags.fill_(1)
        for i in (i for i, tensor in enumerate(tensors) if tensor is None):
            self._flags[i] = 0
        self._stamp.copy_(bits(stamp))

    def present(self) -> list[bool]:
        """Waits for the wire if it is on a GPU."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(self, tensors: Sequence[Tensor | None], stamp: int) -> None:
        """Looks at the stamp first, and writes nothing where it is disputed."""
        self.disputed = not torch.equal((self._stamp != 0).cpu(), bits(stamp))
        if not self.disputed:
            unpack(self._views, tensors)

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor | None, weight: float) -> None:
        """In fp32, or fp64 for fp64, rounded once."""
        mix(tensors, self._views_of(received), None if sent is None else self._views_of(sent), weight)

    def _views_of(self, wire: Tensor) -> list[Tensor]:
        places = (self._layout.tensor(wire, i) for i in range(len(self._like)))
        return [place.as_strided(t.shape, t.stride()) for place, t in zip(places, self._like, strict=True)]


def bits(word: int) -> Tensor:
    """The 64 bits of `word`, lowest first, bool [64].

    >>> bits(0b110).nonzero().flatten().tolist()
    [1, 2]
    """
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(word.to_bytes(8, "little"), np.uint8), bitorder="little").view(np.bool_)
    )
