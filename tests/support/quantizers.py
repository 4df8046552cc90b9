# SPDX-License-Identifier: Apache-2.0
"""The quantizers that tests of kernels go through, and how they compare values."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from commrt.quantizer import BITS, NEAREST, STOCHASTIC, Float8, Quantizer

__all__ = ["KINDS", "QUANTIZERS", "same"]

KINDS = [*(Quantizer(bits) for bits in BITS), Float8()]
QUANTIZERS = [
    replace(kind, feedback=feedback, rounding=rounding, block=64 if feedback == (rounding == STOCHASTIC) else 256)
    for kind, feedback, rounding in product(KINDS, (False, True), (NEAREST, STOCHASTIC))
    if rounding == NEAREST or not (kind.is_float or (feedback and kind.bits == 2))
]
"""Every kind with all its options, each option with blocks of 64 and of 256."""


def same(got: Tensor, want: Tensor) -> bool:
    """Return True if both hold the same values; of NaN the bits may differ."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
