# SPDX-License-Identifier: Apache-2.0
"""Norm: the root of a sum of partial sums of squares."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["norm_of"]


def norm_of(sums: Tensor) -> Tensor:
    """``sqrt(sums[0] + sums[1] + ...)``, a scalar: added in fp64 in one order, rounded to fp32 once."""
    return sums.sum(dtype=torch.float64).sqrt().float()
