# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend that moves tensors to and from one wire buffer.

`torch_packing` implements it in plain torch, `device.packing` in Triton. One thread at a time calls
it; `mismatched` may be read by any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a wire that lie in other memory."""

    pieces: Sequence[tuple[Tensor, int, int]] = ()
    """(memory, begin, end): elements [begin, end) of the wire are those of `memory`."""

    def __bool__(self) -> bool:
        return bool(self.pieces)


NO_PARTS = Parts()


class Packing(Protocol):
    """Moves tensors to and from one wire buffer.

    Tensors come in the order of the layout, None for an absent one. They may change from call to
    call, but not their dtypes, shapes and strides. Another number of tensors raises `ValueError`.
    On a GPU all work is queued on the current stream.
    """

    @property
    def mismatched(self) -> bool:
        """Return True if an `unpack` met another header than its own; on a GPU once it has run."""

    def pack(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """Write tensors times `scale`, zeros for None and riders; flags and bits of `header`."""

    def present(self) -> list[bool]:
        """Return for each tensor whether any rank had it; waits for the wire."""

    def unpack(
        self, tensors: Sequence[Tensor | None], header: int, parts: Parts = NO_PARTS
    ) -> None:
        """Write the wire to tensors; compare the wire's header with `header`.

        The wire's `parts` are read where they lie, by a `Repeatable`; the same object again costs
        nothing. The header is always the wire's own. After a mismatch, plain torch writes nothing;
        a GPU notices it only while it writes.
        """

    def compare(self, header: int) -> None:
        """Compare the wire's header with `header`, as `unpack` does; leave all tensors alone."""

    def mix(
        self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor, weight: float
    ) -> None:
        """Compute ``tensor += weight * (received - sent)`` of wires of this layout.

        What one rank gains its peer loses, even where the wire rounds, so the mean over ranks stays
        the same. It may overwrite `received`.
        """


class Repeatable(Packing, Protocol):
    """A `Packing` whose launches a CUDA graph can record, and replay with other tensors."""

    def aim(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """Set tensors, scale, header of `pack_aimed` and `unpack_aimed`; absent ones are zeros."""

    def load(self, parts: Parts = NO_PARTS) -> None:
        """Compile and load what the next three need, which cannot be done during a capture."""

    def cut(self, chunks: int) -> list[int]:
        """Return bounds [chunks + 1] of an even cut of the wire, where parts may begin and end."""

    def pack_aimed(self) -> None:
        """As `pack`, with one launch whose arguments never change, so a graph can record it.

        What rides is left alone: nobody may read it after that.
        """

    def unpack_aimed(self, parts: Parts = NO_PARTS) -> None:
        """As `unpack`, with one launch whose arguments never change, so a graph can record it."""

    def compare_aimed(self) -> None:
        """As `compare`, with one launch whose arguments never change, so a graph can record it."""

    def repeated(self, tensors: Sequence[Tensor | None]) -> None:
        """Tell autograd that a replayed `unpack_aimed` wrote to `tensors`, those given to `aim`."""
