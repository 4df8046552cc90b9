# SPDX-License-Identifier: Apache-2.0
"""The header of a bucket: what must be equal on all ranks that sum it, and why it may not be.

Pure functions, and text for errors; buckets write the header to their wires. Each bit travels with
its opposite, and all are summed: where both are set, ranks have sent different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor


class Header(NamedTuple):
    """What must be equal on all ranks that sum a bucket; each field counts modulo 2 to the power of
    its width.
    """

    late: int
    """1 if this rank had no backward pass and averages in its optimizer's step."""
    model: int
    """Number of the model among those attached to one world."""
    optimizer_steps: int
    """Since `attach` or the latest ``join()``; each optimizer's have a weight of their own."""
    step: int
    bucket: int
    settings: int
    """A digest of the optimizers' numeric settings, and of the scales of losses."""
    weighed: int = 0
    """1 if `Replica.weigh` was called for the gradients; UNKNOWN on a rank without a backward pass,
    which fits both.
    """


WIDTHS = Header(late=1, model=5, optimizer_steps=5, step=6, bucket=6, settings=8, weighed=1)
UNKNOWN = 2
STARTS = [0, *accumulate(WIDTHS)][:-1]
BITS = sum(WIDTHS)
WEIGHED_AT = STARTS[-1]

EXPLANATIONS = {
    "late": (
        "some ranks came to optimizer.step() without a backward pass and others had one: call"
        " replica.average() where a rank has no batch, in place of its backward()"
    ),
    "model": (
        "the ranks call backward() of the models attached to one world in different orders: use one"
        " order everywhere, and attach models that share a backward pass as one, in an"
        " nn.ModuleList"
    ),
    "optimizer_steps": (
        "the ranks ran different numbers of backward passes for one optimizer.step(), or a"
        ' GradScaler skipped a step on some (leave it out with Gossip(payload="gradients"), where'
        " an overflow reaches few ranks), or they stepped different optimizers: evaluate under"
        " torch.no_grad(), put all but the last pass of an accumulation in no_sync(), and step on"
        " all ranks or on none. With BackupWorkers, call replica.drain() first"
        " in each iteration, and choose the optimizer by replica.step, not by a counter of the loop"
    ),
    "step": (
        "the ranks are at different steps: one ran a backward pass, or loaded a checkpoint, and"
        " others did not"
    ),
    "bucket": (
        "the ranks are at different buckets of a step: a backward pass was interrupted on one of"
        " them"
    ),
    "settings": (
        "the optimizers' settings (learning rate, momentum, ...), or a GradScaler's scale, have"
        " come to differ between ranks: drive schedulers by what is equal everywhere (the step, a"
        " loss averaged over ranks), not by a rank's own data, and give a GradScaler to"
        " attach(also=), so that all ranks begin with rank 0's. Pass them to replica.join() if"
        " ranks run out of data at different times. With BackupWorkers, pass schedulers too to"
        " attach(also=); if the loop has a counter of its own, put `iter_num = replica.step` at"
        " its top"
    ),
    "weighed": (
        "some ranks say with replica.weigh() how much their gradients weigh, and others do not:"
        " call it for the loss of each backward pass, on all ranks"
    ),
}


@lru_cache(256)  # only one of a step is new
def encode(header: Header) -> int:
    """Return `header` as the 64-bit word that `Packing.pack` writes: low bits for zeros, high bits
    for ones.

    What is UNKNOWN has neither.

    >>> hex(encode(Header(late=1, model=0, optimizer_steps=0, step=0, bucket=0, settings=0)))
    '0x1fffffffe'
    """
    word = 0
    for value, width, start in zip(header, WIDTHS, STARTS, strict=True):
        word |= (value % (1 << width)) << start
    both = word << BITS | ~word & ((1 << BITS) - 1)
    return both & ~(1 << WEIGHED_AT | 1 << BITS + WEIGHED_AT) if header.weighed == UNKNOWN else both


SAYS: dict[str, Callable[[int], str]] = {
    "late": ("a backward pass", "none").__getitem__,
    "optimizer_steps": "{} steps of optimizers (those of the n-th count n-fold)".format,
    "step": "step {}".format,
}
"""What two ranks say of themselves where they differ."""


def explain_mismatch(total: Tensor, own: Header | None = None) -> str:
    """Return why `total` [64], the sum of the ranks' header flags, does not come from equal
    headers; `own` is this rank's.

    >>> from commrt.kernels.torch_packing import bits
    >>> one, other = (bits(encode(Header(0, model, 0, 7, 0, 9))).int() for model in (1, 2))
    >>> explain_mismatch(one + other)[:42]
    'the ranks call backward() of the models at'
    """
    set_by_some = (total != 0).cpu()
    differs = set_by_some[:BITS] & set_by_some[BITS:]
    for name, start, width in zip(Header._fields, STARTS, WIDTHS, strict=True):
        if differs[start : start + width].any():
            others = None if own is None else _others(total, own, name)
            if own is None or others is None or name not in SAYS:
                return EXPLANATIONS[name]
            here = SAYS[name](getattr(own, name))
            return f"here {here}, elsewhere {SAYS[name](others)}: {EXPLANATIONS[name]}"
    return (
        "it is no sum of headers: the ranks run different programs, or models in different orders"
    )


def _others(total: Tensor, own: Header, name: str) -> int | None:
    """Return the value of the field `name` that all other ranks have; None if theirs differ."""
    at = Header._fields.index(name)
    width = WIDTHS[at]
    zeros = total[STARTS[at] :][:width].tolist()
    ones = total[BITS + STARTS[at] :][:width].tolist()
    others = zeros[0] + ones[0] - 1
    mine = getattr(own, name)
    value = 0
    for bit in range(width):
        count = ones[bit] - (mine >> bit & 1)
        if count not in (0, others):
            return None
        value |= (count > 0) << bit
    half = 1 << width - 1
    return int(mine + (value - mine + half) % (1 << width) - half)  # the nearest that fits
