# SPDX-License-Identifier: Apache-2.0
"""The quantizers that tests of kernels go through, values for them, and how values are compared."""

from dataclasses import replace
from itertools import product
from math import inf, nan

import torch
from torch import Tensor

from commrt.quantizer import BITS, NEAREST, STOCHASTIC, Float8, Quantizer

KINDS = [*(Quantizer(bits) for bits in BITS), Float8()]
QUANTIZERS = [
    replace(kind, feedback=feedback, rounding=rounding, block=64 if feedback == (rounding == STOCHASTIC) else 256)
    for kind, feedback, rounding in product(KINDS, (False, True), (NEAREST, STOCHASTIC))
    if rounding == NEAREST or not (kind.is_float or (feedback and kind.bits == 2))
]
"""Every kind with all its options, each option with blocks of 64 and of 256."""
ODD = (0.0, 1e-42, 7.8e-31, 7.9e-31, 8e37, 8.6e37, -3e38, -inf, nan)
"""Largest values of blocks: what makes a block zero, infinite or NaN, on both sides of each border."""
STEP = 1.2890625
"""A bfloat16 whose inverse is not exact."""


def values(numel: int, block: int, seed: int = 0) -> Tensor:
    """Return values over many magnitudes, where from the third block on each has one of `ODD`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= 10 ** torch.empty(numel).uniform_(-4, 2, generator=generator)
    for part, odd in zip(x.split(block)[2:], ODD, strict=False):
        if abs(odd) < 1e-20:
            part.mul_(odd / 1000)
        part[7:8] = odd
    return x


def ties(quantizer: Quantizer) -> Tensor:
    """Return a block of values between two codes, whose scale is `STEP`."""
    if quantizer.is_float:
        every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        between = (every[1:] + every[:-1]) / 2
        between = torch.cat([between, -between])
    else:
        between = torch.arange(-quantizer.most, quantizer.most) + 0.5
    block = between.repeat(-(-quantizer.block // len(between)))[: quantizer.block] * STEP
    block[0] = quantizer.largest * 0.9995 * STEP
    return block


def same(got: Tensor, want: Tensor) -> bool:
    """Return True if both hold the same values; of NaN the bits may differ."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
