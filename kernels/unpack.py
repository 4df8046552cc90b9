# SPDX-License-Identifier: Apache-2.0
"""Unpack: a wire buffer back into gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["unpack"]


def unpack(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """``target = cast(source)`` for each pair; targets may have any strides that do not overlap."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
