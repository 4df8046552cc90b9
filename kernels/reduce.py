# SPDX-License-Identifier: Apache-2.0
"""Reduce: add what arrived to what is there, floats in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.kernels.pieces import in_pieces

__all__ = ["reduce_into"]


def reduce_into(out: Tensor, received: Sequence[Tensor]) -> None:
    """``out = cast(out + received[0] + received[1] + ...)``, added from left to right, rounded once.

    Floats are added in fp32, but fp64, integers and complex numbers as they are. All have one dtype and shape, and no
    memory in common.
    """
    if len(received) == 1:
        out.add_(received[0])  # torch adds two 16-bit floats in fp32 and rounds once
        return
    wide = torch.promote_types(out.dtype, torch.float32) if out.is_floating_point() else out.dtype
    for piece, *parts in in_pieces([out, *received]):
        total = piece.to(wide)
        for part in parts:
            total.add_(part)
        if total is not piece:
            piece.copy_(total)
