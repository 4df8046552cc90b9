# SPDX-License-Identifier: Apache-2.0
"""One wire buffer and the tensors that travel in it: what a backend offers, and the one of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from commrt.kernels.layout import Layout, require_as_many
from commrt.kernels.mix import mix
from commrt.kernels.norm import norm_of
from commrt.kernels.pack import pack
from commrt.kernels.unpack import unpack

__all__ = ["Findings", "Packing", "Repeatable", "TorchPacking", "bits"]


@dataclass(slots=True, eq=False)
class Findings:
    """What packing and unpacking find out on the way; made by `Packing.findings`, filled where it is given."""

    nonfinite: Tensor
    """int32 [1], set to 1 by `Packing.pack` if a scaled value is not finite; nobody sets it back."""
    sums: Tensor
    """fp32, partial sums of squares of what was packed or unpacked; overwritten each time.

    0 for tensors that are absent or empty, NaN for others if the scale is not finite, whatever their values.
    """
    count: int = 0
    """How many of them were written last."""


class Packing(Protocol):
    """Moves tensors to and from their places on one wire.

    Tensors come in the order of the layout, None for one that is absent; they may change from call to call, but
    not their dtypes, shapes and strides, and another number of them is refused with `ValueError`. On a GPU all work is
    queued on the current stream.
    """

    @property
    def disputed(self) -> bool:
        """True once `unpack` has met a stamp that was not the own one, for ever; on a GPU when the kernel has run."""
        ...

    def findings(self) -> Findings:
        """Zeros, to be given to `pack` or `unpack` of this wire."""
        ...

    def pack(
        self, tensors: Sequence[Tensor | None], scale: float, stamp: int, findings: Findings | None = None
    ) -> None:
        """Tensors times `scale` to their places, zeros for None; flags; a 1 for each bit set in `stamp`."""
        ...

    def present(self) -> list[bool]:
        """Which tensors somebody had; waits for the wire."""
        ...

    def unpack(
        self,
        tensors: Sequence[Tensor | None],
        stamp: int,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        findings: Findings | None = None,
    ) -> None:
        """Places times `scale` into tensors, or added to them; looks whether the wire's stamp is `stamp`.

        Once one was disputed, plain torch writes nothing; a GPU finds out while it writes.
        """
        ...

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor | None, weight: float) -> None:
        """``tensor += weight * (received - sent)``, both wires of this layout and dtype; None: as they are."""
        ...

    def norm(self, findings: Findings) -> Tensor:
        """The norm of all that was packed or unpacked with `findings`, a scalar; the same bits in every run."""
        ...


class Repeatable(Packing, Protocol):
    """A `Packing` whose launches a device can remember, and repeat without being told where anything lies."""

    def aim(self, tensors: Sequence[Tensor | None], scale: float, stamp: int) -> None:
        """Tell the device what the next `pack_aimed` and `unpack_aimed` move; absent tensors are sent as zeros."""
        ...

    def load(self) -> None:
        """Compile and load what the next two launch, which a device that remembers cannot do."""
        ...

    def pack_aimed(self) -> None:
        """As `pack`; only launches, always the same, which may be remembered."""
        ...

    def unpack_aimed(self) -> None:
        """As `unpack`, unscaled; only launches, always the same, which may be remembered."""
        ...

    def repeated(self, tensors: Sequence[Tensor | None]) -> None:
        """An `unpack_aimed` wrote to `tensors`, the ones aimed at; autograd is told."""
        ...


class TorchPacking:
    """`Packing` in plain torch: one call per tensor, on any device."""

    def __init__(self, wire: Tensor, layout: Layout, like: Sequence[Tensor]) -> None:
        self._layout, self._like = layout, like
        self._views = self._views_of(wire)
        self._flags, self._stamp = layout.flags(wire), layout.stamp(wire)
        self.disputed = False

    def findings(self) -> Findings:
        """Partial sums are those of tensors."""
        device = self._flags.device
        return Findings(torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(len(self._like), device=device))

    def pack(
        self, tensors: Sequence[Tensor | None], scale: float, stamp: int, findings: Findings | None = None
    ) -> None:
        """One pass over each tensor, two more with `findings`."""
        require_as_many(tensors, len(self._like))
        pack(tensors, self._views, scale, *self._watched(findings))
        self._flags.fill_(1)
        for i in (i for i, tensor in enumerate(tensors) if tensor is None):
            self._flags[i] = 0
        self._stamp.copy_(bits(stamp))

    def present(self) -> list[bool]:
        """Waits for the wire if it is on a GPU."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(
        self,
        tensors: Sequence[Tensor | None],
        stamp: int,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        findings: Findings | None = None,
    ) -> None:
        """Looks at the stamp first, and writes nothing where it is disputed."""
        require_as_many(tensors, len(self._like))
        self.disputed = self.disputed or not torch.equal((self._stamp != 0).cpu(), bits(stamp))
        if not self.disputed:
            _, sums = self._watched(findings)
            unpack(self._views, tensors, scale, accumulate=accumulate, sums=sums)

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor | None, weight: float) -> None:
        """In fp32, or fp64 for fp64, rounded once."""
        require_as_many(tensors, len(self._like))
        mix(tensors, self._views_of(received), None if sent is None else self._views_of(sent), weight)

    def norm(self, findings: Findings) -> Tensor:
        """Added in fp64."""
        return norm_of(findings.sums[: findings.count])

    def _watched(self, findings: Findings | None) -> tuple[Tensor | None, Tensor | None]:
        if findings is None:
            return None, None
        findings.count = len(self._like)
        return findings.nonfinite, findings.sums

    def _views_of(self, wire: Tensor) -> list[Tensor]:
        begin = wire.storage_offset()
        pairs = zip(self._like, self._layout.places, strict=True)
        return [wire.as_strided(t.shape, t.stride(), begin + place) for t, place in pairs]


def bits(word: int) -> Tensor:
    """The 64 bits of `word`, lowest first, bool [64].

    >>> bits(0b110).nonzero().flatten().tolist()
    [1, 2]
    """
    return torch.from_numpy(
        np.unpackbits(np.frombuffer(word.to_bytes(8, "little"), np.uint8), bitorder="little").view(np.bool_)
    )
