# SPDX-License-Identifier: Apache-2.0
"""Every collective on tensors of all layouts, sizes and dtypes, beside what it should give."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product
from unittest.mock import patch

import torch
import torch.distributed as dist
from c10d_operations import DTYPES

from commrt.pricing.selection import WIRE_NBYTES

SHAPES = {
    "empty": (2, 0, 4, 5),
    "of one element": (1, 1, 1, 1),
    "small": (2, 3, 4, 5),
    "received in place": (4, 8, 40, 40),
}
SLICED = {"in slices": (4, 8, 70, 70)}
NARROW_NBYTES = 1 << 19
"""Of a wire on which these take two slices, or five where it has a place for each rank."""
BETWEEN = -1


def flat(x):
    return x.reshape(-1) if x.numel() != 1 else x.reshape(())


def transposed(x):
    return x.transpose(0, 3).contiguous().transpose(0, 3)


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def spaced(x):
    """With another element after each one."""
    return torch.stack([x, torch.full_like(x, BETWEEN)], dim=-1)[..., 0]


def inference(x):
    with torch.inference_mode():
        return x.clone()


LAYOUTS = [flat, transposed, channels_last, spaced, inference]


def values(shape, dtype, sender, receiver=0):
    """What one rank has for another: different for each pair, with whole sums."""
    count = torch.tensor(shape).prod().item()
    return ((torch.arange(count) % 251) + 1000 * sender + 100_000 * receiver).view(shape).to(dtype)


def rank():
    return dist.get_rank()


def ranks():
    return range(dist.get_world_size())


def all_reduce(layout, x):
    tensor = layout(x(rank()))
    dist.all_reduce(tensor)
    return [(tensor, sum(map(x, ranks())))]


def reduce_scatter(layout, x):
    output = layout(x(9))
    dist.reduce_scatter(output, [layout(x(rank(), each)) for each in ranks()])
    return [(output, sum(x(each, rank()) for each in ranks()))]


def broadcast(layout, x):
    tensor = layout(x(rank()))
    dist.broadcast(tensor, 1)
    return [(tensor, x(1))]


def all_gather(layout, x):
    outputs = [layout(x(9)) for _ in ranks()]
    dist.all_gather(outputs, layout(x(rank())))
    return [(output, x(each)) for each, output in enumerate(outputs)]


def gather(layout, x):
    outputs = [layout(x(9)) for _ in ranks()] if rank() == 2 else None
    dist.gather(layout(x(rank())), outputs, dst=2)
    return [(output, x(each)) for each, output in enumerate(outputs or [])]


def scatter(layout, x):
    output = layout(x(9))
    dist.scatter(output, [layout(x(3, each)) for each in ranks()] if rank() == 3 else None, src=3)
    return [(output, x(3, rank()))]


def all_to_all(layout, x):
    outputs = [layout(x(9)) for _ in ranks()]
    dist.all_to_all(outputs, [layout(x(rank(), each)) for each in ranks()])
    return [(output, x(each, rank())) for each, output in enumerate(outputs)]


MOVING = [broadcast, all_gather, gather, scatter, all_to_all]
CALLS = [all_reduce, reduce_scatter, *MOVING]


def is_right(layout, tensor, expected):
    between = tensor._base[..., 1] if layout is spaced else torch.empty(0)
    return torch.equal(tensor, expected.view(tensor.shape)) and bool((between == BETWEEN).all())


def layouts():
    """The (layout, call, size) that give another result: each pair of these three is tried."""
    cases = product(enumerate(LAYOUTS), enumerate(CALLS))
    return wrong((layout, call, [*SHAPES][(one + other) % len(SHAPES)]) for (one, layout), (other, call) in cases)


def slices():
    """The calls that give another result in several slices."""
    with patch.dict(WIRE_NBYTES, cpu=NARROW_NBYTES):
        return wrong((flat, call, "in slices") for call in CALLS)


def inside():
    """The calls that give another result to a caller in inference mode."""
    with torch.inference_mode():
        return wrong((flat, call, size) for call, size in zip(CALLS, cycle(SHAPES), strict=False))


def wrong(cases):
    return [
        f"{layout.__name__}, {call.__name__}, {size}"
        for layout, call, size in cases
        if not is_moved(layout, call, (SHAPES | SLICED)[size], torch.float32)
    ]


def dtypes():
    """The (call, dtype) whose elements do not move as they are."""
    cases = product(MOVING, DTYPES)
    return [f"{call.__name__}, {dtype}" for call, dtype in cases if not is_moved(flat, call, SHAPES["small"], dtype)]


def is_moved(layout, call, shape, dtype):
    return all(is_right(layout, *pair) for pair in call(layout, partial(values, shape, dtype)))
