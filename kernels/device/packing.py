# SPDX-License-Identifier: Apache-2.0
"""Move tensors to and from one wire buffer on a GPU: one launch to pack, one to unpack.

One thread at a time. All is queued on its current stream. Only `present` waits for the GPU, and a
copy of addresses for the one before the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from commrt.kernels.device import variants
from commrt.kernels.device.launch import Launch, arch_of, launch_of, require_aligned
from commrt.kernels.device.variants import Variant, sizes_for
from commrt.kernels.layout import WIDEST_NBYTES, Layout
from commrt.kernels.packing import NO_PARTS, Parts
from commrt.kernels.tables import Tables

ALIGNMENTS = (16, 8, 4, 2)


class TritonPacking:
    """A `Repeatable` in Triton.

    The constructor compiles the kernels that pack and unpack, in about 0.1 s each unless Triton's
    cache has them; other options compile at their first use. A call then allocates nothing and
    waits for nothing. It copies addresses to the device only if a tensor has moved since the last
    call. CUDA graphs can capture `pack_aimed` and `unpack_aimed`. The wire's device must be the
    thread's current one.
    """

    def __init__(self, wire: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        require_aligned(wire)
        self.tables = Tables(layout, sizes_for(arch_of(wire.device)).tile, wire.device)
        self._dtype = dtype
        self._wire = wire
        self._flags = layout.flags(wire)
        self._riders = layout.riders(wire) if layout.riding else None
        self._scale = _Scalar(wire.device)
        self._weight = _Scalar(wire.device)
        self._header = 0  # of captured launches, and the same on the device
        self._held = torch.zeros(1, dtype=torch.int64, device=wire.device)
        # aligned copies, by index, of tensors that once were not aligned
        self._stages: dict[int, Tensor] = {}
        # those that captured launches use now: set by `aim`, copied back and dropped by `repeated`
        self._staged: dict[int, Tensor] = {}
        # written by the GPU, read here
        mark = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=wire.is_cuda)
        # the array keeps the memory
        self._mark = mark.data_ptr()
        self._seen = mark.numpy()
        # first arguments of kernels: a table of one absent tensor, or that of all; and the wire
        self._nothing = torch.zeros(1, dtype=torch.int64, device=wire.device)
        self._nowhere = (*[self._nothing.data_ptr()] * len(self.tables.columns), wire.data_ptr())
        self._fixed = (*(column.data_ptr() for column in self.tables.columns), wire.data_ptr())
        self._columns = WeakKeyDictionary[Parts, Tensor]()  # of offsets
        self._kernels: dict[tuple[object, ...], Launch] = {}
        self._alignments = [align for align in ALIGNMENTS if align >= dtype.itemsize]
        for align in self._alignments:
            self._kernel(variants.pack, align)
            self._kernel(variants.unpack, align)

    @property
    def mismatched(self) -> bool:
        """See `Packing.mismatched`: read from pinned memory that the kernel writes; never waits."""
        return bool(self._seen[0])

    def pack(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """See `Packing.pack`: one launch, and one more where something may ride."""
        self.tables.point_at(tensors)
        launch = self._kernel(variants.pack, self.tables.align)
        launch(self.tables.tiles, *self._fixed, header, self._scale.at(scale))
        if self._riders is not None:
            self._riders.zero_()

    def present(self) -> list[bool]:
        """See `Packing.present`."""
        present: list[bool] = (self._flags != 0).tolist()
        return present

    def unpack(
        self, tensors: Sequence[Tensor | None], header: int, parts: Parts = NO_PARTS
    ) -> None:
        """See `Packing.unpack`: one launch; writes even if headers differ: the host cannot know."""
        self.tables.point_at(tensors)
        launch = self._kernel(variants.unpack, self.tables.align, wide=bool(parts))
        launch(self.tables.tiles, *self._read(parts), header, self._mark)
        _note_written(tensors)

    def compare(self, header: int) -> None:
        """See `Packing.compare`: one launch of one program."""
        self._kernel(variants.unpack, WIDEST_NBYTES)(1, *self._nowhere, header, self._mark)

    def repeated(self, tensors: Sequence[Tensor | None]) -> None:
        """See `Repeatable.repeated`."""
        staged = self._staged
        self._staged = {}
        for index, stage in staged.items():
            cast("Tensor", tensors[index]).copy_(stage)
        _note_written(tensor for index, tensor in enumerate(tensors) if index not in staged)

    def aim(self, tensors: Sequence[Tensor | None], scale: float, header: int) -> None:
        """See `Repeatable.aim`: one launch for a changed header, for the rest copies as `pack`.

        A captured launch reads 16 bytes at once. Tensors that are less aligned are copied here, and
        back by `repeated`.
        """
        odd = [
            i
            for i, tensor in enumerate(tensors)
            if tensor is not None and tensor.data_ptr() % WIDEST_NBYTES
        ]
        self._staged = {index: self._stage(index, cast("Tensor", tensors[index])) for index in odd}
        if odd:
            tensors = [self._staged.get(index, tensor) for index, tensor in enumerate(tensors)]
        self.tables.point_at(tensors)
        self._scale.at(scale)
        if header != self._header:
            self._held.fill_(header - (1 << 64) if header >> 63 else header)
            self._header = header

    def _stage(self, index: int, tensor: Tensor) -> Tensor:
        if index not in self._stages:
            self._stages[index] = torch.empty_like(tensor)
        return self._stages[index].copy_(tensor)

    def load(self, parts: Parts = NO_PARTS) -> None:
        """See `Repeatable.load`."""
        self._held_pack()
        self._held_unpack(NO_PARTS)
        if parts:
            self._read(parts)
            self._held_unpack(parts)
            for align in self._alignments:
                self._kernel(variants.unpack, align, wide=True)

    def cut(self, chunks: int) -> list[int]:
        """See `Repeatable.cut`."""
        return self.tables.cut(chunks, self._wire.numel())

    def _read(self, parts: Parts) -> tuple[int, ...]:
        """Return the first arguments of a kernel that reads `parts` where they lie."""
        if not parts:
            return self._fixed
        column = self._columns.get(parts)
        if column is None:
            column = self._columns[parts] = self.tables.offsets_in(self._wire, parts.pieces)
        return (*self._fixed[:-2], column.data_ptr(), self._fixed[-1])

    def _held_pack(self) -> Launch:
        return self._kernel(variants.pack, WIDEST_NBYTES, held=True)

    def _held_unpack(self, parts: Parts) -> Launch:
        return self._kernel(variants.unpack, WIDEST_NBYTES, held=True, wide=bool(parts))

    def pack_aimed(self) -> None:
        """See `Repeatable.pack_aimed`."""
        self._held_pack()(
            self.tables.tiles, *self._fixed, self._held.data_ptr(), self._scale.address
        )

    def unpack_aimed(self, parts: Parts = NO_PARTS) -> None:
        """See `Repeatable.unpack_aimed`."""
        self._held_unpack(parts)(
            self.tables.tiles, *self._read(parts), self._held.data_ptr(), self._mark
        )

    def compare_aimed(self) -> None:
        """See `Repeatable.compare_aimed`: one launch of one program."""
        self._held_unpack(NO_PARTS)(1, *self._nowhere, self._held.data_ptr(), self._mark)

    def mix(
        self, tensors: Sequence[Tensor | None], received: Tensor, sent: Tensor, weight: float
    ) -> None:
        """See `Packing.mix`: one launch."""
        require_aligned(received, sent)
        self.tables.point_at(tensors)
        launch = self._kernel(variants.mix, self.tables.align, inputs=3)
        wires = received.data_ptr(), sent.data_ptr()
        launch(self.tables.tiles, *self._fixed[:-1], *wires, self._weight.at(weight))
        _note_written(tensors)

    def _kernel(
        self, make: Callable[..., Variant], align: int, inputs: int = 1, **options: bool
    ) -> Launch:
        key = (make, align, *[name for name, is_so in options.items() if is_so])
        launch = self._kernels.get(key)
        if launch is None:
            sizes = sizes_for(arch_of(self._wire.device), inputs, align)
            variant = make(self._dtype, self._wire.dtype, align, sizes, **options)
            launch = self._kernels[key] = launch_of(variant, self._wire.device)
        return launch


def _note_written(tensors: Iterable[Tensor | None]) -> None:
    increment_version([tensor for tensor in tensors if tensor is not None])


class _Scalar:
    """A number in GPU memory, written when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(1, device=device)
        self._known = 0.0
        self.address = self._memory.data_ptr()

    def at(self, value: float) -> int:
        """Return the address of `value`, written in stream order by a kernel, not copied."""
        if value != self._known:
            self._memory.fill_(value)
            self._known = value
        return self.address
