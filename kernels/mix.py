# SPDX-License-Identifier: Apache-2.0
"""Mix: move a buffer part of the way towards what arrived."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mix_into"]


def mix_into(out: Tensor, received: Tensor, weight: float) -> None:
    """``out = cast(out + weight * (received - out))`` in fp32 (fp64 for fp64): no overflow of 16-bit sums."""
    wide = torch.promote_types(out.dtype, torch.float32)
    own = out.to(wide)
    out.copy_(own + weight * (received.to(wide) - own))
