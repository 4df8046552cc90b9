# SPDX-License-Identifier: Apache-2.0
"""A sum that is bound to its wire buffer: pack the caller's tensor, run the schedule, unpack.

A header travels before the values, so ranks find out if their calls differ. On the communication
thread, or the caller's in its place; writes the caller's tensor, its residual (what rounding lost,
for the next call), and the wire buffer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from torch import Tensor

from commrt.errors import DisagreementError
from commrt.kernels.packing import Packing
from commrt.runtime.all_reduce_call import AllReduce
from commrt.runtime.executor import RunnableProgram
from commrt.threads.recording import Recorder
from commrt.transport.protocol import Tag

HEADERS_KEPT = 256


@lru_cache(HEADERS_KEPT)
def _header(checksum: int, tag: Tag) -> int:
    """Return 64 bits that show in the sum over ranks if calls differ: a checksum, twice."""
    both = zlib.crc32(f"{tag.step} {tag.bucket}".encode(), checksum)
    return both << 32 | ~both & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class BoundSum:
    """An all-reduce of tensors of one layout, bound to the wire buffer."""

    call: AllReduce
    algorithm: str
    """The name of its schedule."""
    program: RunnableProgram
    packing: Packing
    """Between the tensor and the wire buffer; finds headers of other calls."""
    scale: float
    """By which values are multiplied as they are packed."""
    checksum: int
    """Checksum of all that must be equal on all ranks but the tag."""
    residual: Tensor | None
    """What `program` uses for the caller's residual, which may lie elsewhere in each call."""

    def run(
        self, tensor: Tensor, residual: Tensor | None, tag: Tag, recorder: Recorder | None = None
    ) -> None:
        """Overwrite `tensor` with the result, and `residual` with what rounding lost."""
        # a view that is negated when read
        is_dense = tensor.stride() == self.call.strides and not tensor.is_neg()
        dense = tensor if is_dense else self.call.empty(tensor.device).copy_(tensor)
        header = _header(self.checksum, tag)
        if self.residual is not None and residual is not None:
            self.residual.copy_(residual)
        self.carry(dense, header, tag, recorder)
        if self.residual is not None and residual is not None:
            residual.copy_(self.residual)
        if dense is not tensor:
            tensor.copy_(dense)

    def carry(self, dense: Tensor, header: int, tag: Tag, recorder: Recorder | None) -> None:
        """Overwrite `dense`, of the call's layout, with the result; for `run`."""
        self.packing.pack([dense], self.scale, header)
        self.program.run(tag, recorder)
        self.packing.unpack([dense], header)
        if self.packing.mismatched:
            self.refuse(tag)

    def refuse(self, tag: Tag) -> NoReturn:
        """Raise `DisagreementError`: the ranks' calls were different ones."""
        raise DisagreementError(
            f"all_reduce() of {self.call}, at step {tag.step}, as {tag.bucket}: another rank"
            " came with another op, shape, layout in memory, dtype, wire, algorithm or tag;"
            " make the same calls in the same order on every rank"
        )
