# SPDX-License-Identifier: Apache-2.0
"""A large sum on a CPU in slices: a part of each chunk at a time, so that it stays in a cache.

Each element is added in the same order as if all were added at once. The places on the wire are
those of a whole sum, too: a header, the values, padding. A slice has the next few of each chunk,
side by side in one wire buffer that all slices share. With a header H, values a to k, two chunks of
six and two elements of each at a time::

    whole sum   H a b c d e   f g h i j k
    slice 0     H a           f g            carries values [0:1) and [5:7), and the header
    slice 1         b c           h i        carries values [1:3) and [7:9)
    slice 2             d e           j k    carries values [3:5) and [9:11)

It runs on the communication thread, or the caller's in its place. It writes the caller's tensor
and the wire buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.kernels.layout import GRANULE, layout_of
from commrt.kernels.plain_torch import pack
from commrt.program import Program, chunk_bounds
from commrt.runtime.all_reduce_call import AllReduce
from commrt.runtime.bound_sum import BoundSum
from commrt.runtime.executor import RunnableProgram, Scratch, bind
from commrt.runtime.wire import is_quantized
from commrt.threads.recording import Recorder
from commrt.threads.streams import Streams
from commrt.transport.protocol import Tag, Transport

SLICE_NUMEL = 1 << 20
"""Elements of a large sum on a CPU that travel at once."""


class Slice(NamedTuple):
    """What travels at once."""

    program: RunnableProgram
    places: list[Tensor]
    """Where the tensor's elements lie on the wire."""
    spans: list[slice]
    """Their places in the tensor."""


@dataclass(frozen=True, slots=True)
class SlicedSum(BoundSum):
    """A sum in slices; `program` is the first one's, `packing` packs the header only."""

    slices: Sequence[Slice]

    def carry(self, dense: Tensor, header: int, tag: Tag, recorder: Recorder | None) -> None:
        """See `BoundSum.carry`. The first slice has the header: it ends before any is written."""
        row = dense.as_strided((dense.numel(),), (1,))
        for number, (program, places, spans) in enumerate(self.slices):
            parts = [*map(row.__getitem__, spans)]
            pack(parts, places, self.scale)
            if number == 0:
                self.packing.pack([row[:0]], 1.0, header)
            program.run(tag, recorder)
            if number == 0:
                self.packing.unpack([row[:0]], header)
                if self.packing.mismatched:
                    self.refuse(tag)
            torch._foreach_copy_(parts, places)


def travels_in_slices(call: AllReduce, chunks: int) -> bool:
    """Return True for a sum that is cut into slices, where its schedule has so many `chunks`."""
    is_plain = call.device.type == "cpu" and not is_quantized(call.wire)
    head_numel = layout_of([call.shape.numel()]).head_numel
    # else the header would not fit the first chunk of a slice
    return is_plain and call.shape.numel() > SLICE_NUMEL and SLICE_NUMEL // chunks >= head_numel


def slice_numel(chunks: int) -> int:
    """Return the elements of the wire buffer: as many of each of `chunks`, multiples of GRANULE."""
    return SLICE_NUMEL // chunks // GRANULE * GRANULE * chunks


def bind_slices(
    call: AllReduce,
    mine: Program,
    wire: Tensor,
    transport: Transport,
    scratch: Scratch,
    streams: Streams,
) -> list[Slice]:
    """Return the slices of `call`, bound to `wire` [slice_numel]."""
    layout = layout_of([call.shape.numel()])
    values = range(layout.head_numel, layout.head_numel + call.shape.numel())
    chunks = [*pairwise(chunk_bounds(layout.numel, mine.chunks, GRANULE))]
    step = len(wire) // mine.chunks
    slices = list[Slice]()
    # by their cuts of the wire: nearly all slices are cut alike
    programs = dict[tuple[int, ...], RunnableProgram]()
    for lo in range(0, max(end - begin for begin, end in chunks), step):
        parts = [(min(begin + lo, end), min(begin + lo + step, end)) for begin, end in chunks]
        cut = tuple(accumulate((end - begin for begin, end in parts), initial=0))
        if cut not in programs:
            programs[cut] = bind(mine, wire[: cut[-1]], transport, scratch, streams, bounds=cut)
        places = list[Tensor]()
        spans = list[slice]()
        for start, (begin, end) in zip(cut[:-1], parts, strict=True):
            first = max(begin, values.start)
            last = min(end, values.stop)
            if first < last:  # neither header nor padding only
                places.append(wire[start + first - begin : start + last - begin])
                spans.append(slice(first - values.start, last - values.start))
        slices.append(Slice(programs[cut], places, spans))
    return slices
