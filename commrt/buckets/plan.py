# SPDX-License-Identifier: Apache-2.0
"""Groups the parameters of a model, and makes the buckets of their gradients with their memory.

It keeps no state. On the thread that trains, but for buckets made anew after a lost rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from commrt.buckets.dtypes import gradient_dtype, wire_dtype
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.overlap_check import OverlapCheck
from commrt.buckets.riders import Riders, riding_numel
from commrt.buckets.tensors import Named
from commrt.kernels.layout import layout_of
from commrt.runtime.wire import AnyWire, is_quantized
from commrt.transport.protocol import Allocate, zeros

MIB = 1 << 20
FIRST_CAP_NBYTES = MIB


def plan_buckets(tensors: Iterable[tuple[int, torch.dtype]], cap_nbytes: int) -> list[list[int]]:
    """Group `tensors`, (bytes, dtype) in ready order, into buckets of one dtype; one closes when it
    reaches the cap.

    The first bucket of each dtype closes at `FIRST_CAP_NBYTES`, if that is less, so that
    communication starts early. Buckets are sorted by when their last member becomes ready.

    >>> plan_buckets([(MIB, torch.float32)] * 5, cap_nbytes=2 * MIB)
    [[0], [1, 2], [3, 4]]
    """
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    left: dict[torch.dtype, int] = {}
    for index, (nbytes, dtype) in enumerate(tensors):
        filling.setdefault(dtype, []).append(index)
        left[dtype] = left.get(dtype, min(FIRST_CAP_NBYTES, cap_nbytes)) - nbytes
        if left[dtype] <= 0:
            closed.append(filling.pop(dtype))
            left[dtype] = cap_nbytes
    return sorted([*closed, *filling.values()], key=lambda members: members[-1])


def build_buckets(  # noqa: PLR0913, PLR0917  # of gradients, and of fragments
    params: Sequence[Named],
    wire: AnyWire | None,
    cap_nbytes: int,
    model: int = 0,
    allocate: Allocate = zeros,
    first: int = 0,
    kind: type[GradientBucket] = GradientBucket,
    riding: tuple[int, int] | None = None,
) -> list[GradientBucket]:
    """Return buckets for `params`, given in ready order, numbered from `first` on; `allocate` makes
    wire buffers.

    The first one has slots for what rides, if `riding` says the rank and the number of ranks.
    """
    dtypes = [gradient_dtype(param) for _, param in params]
    sizes = [
        (param.numel() * dtype.itemsize, dtype)
        for (_, param), dtype in zip(params, dtypes, strict=True)
    ]
    overlaps = OverlapCheck()
    buckets = list[GradientBucket]()
    quantized = wire if is_quantized(wire) else None
    for index, places in enumerate(plan_buckets(sizes, cap_nbytes), first):
        members = [params[i] for i in places]
        dtype = dtypes[places[0]]
        rank, ranks = (0, 0) if riding is None or buckets else riding
        layout = layout_of([param.numel() for _, param in members], riding_numel(ranks))
        buffer = allocate(layout.numel, wire_dtype(dtype, wire), members[0][1].device)
        buckets.append(kind(index, members, layout, buffer, model, overlaps, quantized))
        if ranks:
            buckets[0].carry_riders(Riders(layout.riders(buffer)[: riding_numel(ranks)], rank))
    return buckets
