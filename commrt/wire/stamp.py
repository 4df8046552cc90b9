# SPDX-License-Identifier: Apache-2.0
"""What every rank claims about a bucket it sends, in a form that survives being summed.

Point-to-point calls have no tags on NCCL: two ranks that are at different places of their programs would sum
buckets that have nothing to do with each other. So each bucket carries two places per bit of what it is: the rank sets
the one that says 0 or the one that says 1. In the sum both are set exactly where ranks differ.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

__all__ = ["WIDTHS", "Claim", "complaint", "sealed", "stamp"]


class Claim(NamedTuple):
    """What must be equal on all ranks when they sum a bucket; each field counts modulo 2 to its width."""

    late: int
    """1 if this rank had no backward pass and averages in its optimizer's step."""
    model: int
    """Which of the models attached to one world."""
    optimizer_steps: int
    """Since `attach` or the last ``join()``."""
    step: int
    bucket: int
    settings: int
    """A digest of the numbers with which the optimizers step."""


WIDTHS = Claim(late=1, model=6, optimizer_steps=5, step=6, bucket=6, settings=8)
STARTS = [0, *accumulate(WIDTHS)][:-1]
BITS = sum(WIDTHS)

EXPLANATIONS = {
    "late": "some ranks came to optimizer.step() without a backward pass and others had one: call replica.average() "
    "where a rank has no batch, in place of its backward()",
    "model": "the ranks call backward() of the models attached to one world in different orders: use one order "
    "everywhere, and attach models that share a backward pass as one, in an nn.ModuleList",
    "optimizer_steps": "the ranks ran different numbers of backward passes for one optimizer.step(), or stepped "
    "differently often: put all but the last pass of an accumulation in no_sync()",
    "step": "the ranks are at different steps: one ran a backward pass, or loaded a checkpoint, and others did not",
    "bucket": "the ranks are at different buckets of a step: a backward pass was interrupted on one of them",
    "settings": "the optimizers' settings (learning rate, momentum, ...) have come to differ between ranks: drive "
    "schedulers by what is equal everywhere (the step, a loss averaged over ranks), not by a rank's own data, and pass "
    "them to replica.join() where ranks may run out of data at different times",
}


def stamp(claim: Claim) -> int:
    """Which of the 64 places `claim` sets, as the bits of a word: low ones where it has a 0, high ones for a 1.

    >>> hex(stamp(Claim(late=1, model=0, optimizer_steps=0, step=0, bucket=0, settings=0)))
    '0x1fffffffe'
    """
    return sealed(sum((value % (1 << width)) << at for value, width, at in zip(claim, WIDTHS, STARTS, strict=True)))


def sealed(word: int) -> int:
    """As `stamp`, for a claim of 32 bits that has no fields.

    >>> hex(sealed(0xFF))
    '0xffffffff00'
    """
    return word << BITS | ~word & ((1 << BITS) - 1)


def complaint(total: Tensor) -> str:
    """Why the sum `total` [64] of the ranks' stamps is not that of equal ones.

    >>> from commrt.kernels.packing import bits
    >>> both = bits(stamp(Claim(0, 1, 0, 7, 0, 9))).int() + bits(stamp(Claim(0, 2, 0, 7, 0, 9))).int()
    >>> complaint(both)[:42]
    'the ranks call backward() of the models at'
    """
    set_by_some = (total != 0).cpu()
    disputed = set_by_some[:BITS] & set_by_some[BITS:]
    for name, start, width in zip(Claim._fields, STARTS, WIDTHS, strict=True):
        if disputed[start : start + width].any():
            return EXPLANATIONS[name]
    return "it is no sum of stamps: the ranks run different programs"
