# SPDX-License-Identifier: Apache-2.0
"""Mix: move tensors part of the way towards what arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.kernels.pieces import in_pieces

__all__ = ["mix", "mix_into"]


def mix(
    tensors: Sequence[Tensor | None], received: Sequence[Tensor], sent: Sequence[Tensor] | None, weight: float
) -> None:
    """``own += weight * (received - sent)`` for each of `tensors` but None.

    `received` and `sent` as both were on the wire: then what one rank gains its peer loses, even where the wire
    rounds, and the mean over ranks stays. With None for `sent`, this rank sent its own values as they are.
    """
    for i, own in enumerate(tensors):
        if own is not None:
            mix_into(own, received[i], weight, None if sent is None else sent[i])


def mix_into(own: Tensor, received: Tensor, weight: float, sent: Tensor | None = None) -> None:
    """``own = cast(own + weight * (received - sent))`` in fp32 (fp64 for fp64): no overflow of 16-bit sums."""
    wide = torch.promote_types(own.dtype, torch.float32)
    for piece, came, went in in_pieces([own, received, own if sent is None else sent]):
        moved = torch.sub(came.to(wide), went.to(wide)).mul_(weight)
        if own.dtype == wide:
            piece.add_(moved)
        else:
            piece.copy_(moved.add_(piece))
