# SPDX-License-Identifier: Apache-2.0
"""Unpack: places on a wire back into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commrt.kernels.pack import square_sums

__all__ = ["unpack"]


def unpack(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    accumulate: bool = False,
    sums: Tensor | None = None,
) -> None:
    """``target = cast(source * scale)`` for each pair, or ``cast(target + source * scale)``; nothing for None.

    In fp32 (fp64 for fp64), rounded once. `sums` [pairs] gets the sums of squares of what is stored, before the cast,
    as those of `pack`.
    """
    if scale == 1.0 and not accumulate and sums is None:
        there = [(target, source) for target, source in zip(targets, sources, strict=True) if target is not None]
        if there:
            torch._foreach_copy_([target for target, _ in there], [source for _, source in there])
        return
    values = [
        None if target is None else _value(source, target, scale, accumulate)
        for source, target in zip(sources, targets, strict=True)
    ]
    for target, value in zip(targets, values, strict=True):
        if target is not None and value is not None:
            target.copy_(value)
    if sums is not None:
        square_sums(values, 1.0, scale, sums)


def _value(source: Tensor, target: Tensor, scale: float, accumulate: bool) -> Tensor:
    if scale == 1.0 and not accumulate:
        return source
    value = source.to(torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)) * scale
    return value + target if accumulate else value
