# SPDX-License-Identifier: Apache-2.0
"""What a collective of a group is: what must be equal on all ranks, and the tensors of one rank.

Values that never change: made on the thread that calls, read on the one that runs the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.algorithms.catalogue import ROOTED


class Piece(NamedTuple):
    """Where the piece of a slot lies: in a row of the call, from element `begin` on."""

    slot: int
    row: int
    begin: int


class Kind(NamedTuple):
    """A call without its memory: calls of one kind run the same programs on the same wire.

    All but the device, and where pieces lie in rows, must be equal on all ranks; but see `sizes`.
    """

    collective: str
    dtype: torch.dtype
    operation: str | None
    """What ADD stands for; None if nothing is combined."""
    root: int
    sizes: tuple[int, ...]
    """[slots] elements of each piece, in elements of the wire's dtype. They may differ in an
    `all_gather` and a `reduce_scatter`; and in an `all_to_all`, where ranks do not know all of
    them: they are 0 for a slot that this rank does not use.
    """
    put: tuple[Piece, ...]
    """What this rank contributes."""
    take: tuple[Piece, ...]
    """Where this rank wants the result."""
    device: torch.device
    divisor: int = 1
    """What the result is divided by; integers are rounded towards zero, as by NCCL."""
    is_scaled: bool = False
    """True if each rank's contribution is multiplied by a factor of its own."""

    def __str__(self) -> str:
        """Name the call as in errors: ``all_reduce (sum) of float32[100]``; equal on all ranks."""
        if self.collective == "barrier":
            return self.collective
        how = f" ({self.operation})" if self.operation else ""
        from_root = f", root {self.root}" if self.collective in ROOTED else ""
        size = f"[{self._size_text}]" if self.is_known else ""
        return f"{self.collective}{how} of {str(self.dtype)[6:]}{size}{from_root}"

    @property
    def _size_text(self) -> str:
        slots = len(self.sizes)
        unit = self.dtype.itemsize // self.wire_dtype.itemsize
        numels = [size // unit for size in self.sizes]
        if slots == 1:
            return str(numels[0])
        return str((slots, numels[0] if len(set(numels)) == 1 else numels))

    @property
    def is_known(self) -> bool:
        """True if all ranks know the sizes of all pieces."""
        return self.collective != "all_to_all"

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the wire: that of the tensors if they are combined, bytes otherwise."""
        return torch.uint8 if self.operation is None else self.dtype

    @property
    def piece_nbytes(self) -> int:
        """Bytes of the largest piece; 0 where no rank knows it."""
        return max(self.sizes) * self.wire_dtype.itemsize if self.is_known else 0


@dataclass(slots=True, eq=False)
class Call:
    """One collective as a rank asks for it, checked.

    Rows share memory with tensors, or are copies of what has gaps.
    """

    kind: Kind
    put: Sequence[Tensor]
    """Rows that this rank contributes."""
    take: Sequence[Tensor]
    """Rows that the result is written to."""
    result: Sequence[Tensor]
    """What the work of the call returns: tensors of the caller."""
    factor: Tensor | float | None = None
    """What this rank's contribution is multiplied by."""
    copies: Sequence[tuple[Tensor, Tensor]] = ()
    """(target, row) pairs to copy at the end: tensors with gaps, and the rows that are taken for
    them.
    """
