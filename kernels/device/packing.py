# SPDX-License-Identifier: Apache-2.0
"""One wire buffer and the tensors that travel in it, on a GPU: one launch to pack, one to unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from commrt.kernels.device import variants
from commrt.kernels.device.launch import Launch, arch_of, launch_of
from commrt.kernels.device.sizes import sizes_for, tile_for
from commrt.kernels.device.variants import DTYPES, Variant
from commrt.kernels.layout import Layout
from commrt.kernels.tables import Tables

__all__ = ["TritonPacking"]

ALIGNMENTS = (16, 8, 4, 2)


class TritonPacking:
    """`commrt.kernels.packing.Packing` in Triton.

    Everything is compiled here, in about 0.1 s for each kernel that Triton's cache does not have. A call then allocates
    nothing, waits for nothing, and copies to the device only if a tensor or the scale has changed since the last one;
    otherwise it can be captured in a CUDA graph, which repeats its stamp.
    """

    def __init__(self, wire: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        if dtype not in DTYPES or wire.dtype not in DTYPES:
            raise ValueError(f"{dtype} tensors on a {wire.dtype} wire: on GPUs only {[*map(str, DTYPES)]} are offered")
        self.tables = Tables(layout, tile_for(arch_of(wire.device)), wire.device)
        self._flags = layout.flags(wire)
        self._scale = torch.zeros(1, device=wire.device)
        self._weight = torch.zeros(1, device=wire.device)
        self._known_scale = self._known_weight = 0.0
        mark = torch.zeros(1, dtype=torch.int32, pin_memory=wire.is_cuda)  # written by the GPU, read here
        self._mark, self._seen = mark.data_ptr(), mark.numpy()  # which keeps the memory
        self._columns = tuple(column.data_ptr() for column in self.tables.columns)
        self._wire, self._factor = wire.data_ptr(), self._scale.data_ptr()
        self._dtype = dtype
        aligns = [align for align in ALIGNMENTS if align >= dtype.itemsize]
        self._pack = {align: self._launch(variants.pack, align) for align in aligns}
        self._unpack = {align: self._launch(variants.unpack, align) for align in aligns}

    @property
    def disputed(self) -> bool:
        """Read from pinned memory: shows when an `unpack` that found a dispute has run, and costs no waiting."""
        return bool(self._seen[0])

    def pack(self, tensors: Sequence[Tensor | None], scale: float, stamp: int) -> None:
        """One launch."""
        self.tables.point_at(tensors)
        if scale != self._known_scale:
            self._scale.fill_(scale)
            self._known_scale = scale
        self._pack[self.tables.align](self.tables.tiles, *self._columns, self._wire, stamp, self._factor, 0, 0)

    def present(self) -> list[bool]:
        """Waits for the wire."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(self, tensors: Sequence[Tensor | None], stamp: int) -> None:
        """One launch; writes even where the stamp is disputed, which nobody on this side can know yet."""
        self.tables.point_at(tensors)
        launch = self._unpack[self.tables.align]
        launch(self.tables.tiles, *self._columns, self._wire, stamp, self._mark, 0, 0)
        increment_version([tensor for tensor in tensors if tensor is not None])

    def mix(self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor | None, weight: float) -> None:
        """One launch; kernels for this are compiled at the first call."""
        self.tables.point_at(tensors)
        if weight != self._known_weight:
            self._weight.fill_(weight)
            self._known_weight = weight
        launch = self._mix[self.tables.align, sent is not None]
        wires = received.data_ptr(), 0 if sent is None else sent.data_ptr()
        launch(self.tables.tiles, *self._columns, *wires, self._weight.data_ptr())
        increment_version([tensor for tensor in tensors if tensor is not None])

    def _launch(self, make: Callable[..., Variant], align: int, inputs: int = 1) -> Launch:
        sizes = sizes_for(arch_of(self._flags.device), inputs, align)
        return launch_of(make(self._dtype, self._flags.dtype, align, sizes), self._flags.device)

    @cached_property
    def _mix(self) -> dict[tuple[int, bool], Launch]:
        make = {sent: partial(variants.mix, sent=sent) for sent in (False, True)}
        return {
            (align, sent): self._launch(make[sent], align, inputs=2 + sent) for align in self._pack for sent in make
        }
