# SPDX-License-Identifier: Apache-2.0
"""The kind of a tensor (dtype, shape, strides), and as text the kinds of a bucket's tensors.

Frozen data and a function, for any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from commrt.runtime.wire import AnyWire, is_quantized


class TensorKind(NamedTuple):
    """Dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """Return that of `tensor`."""
        return cls(tensor.dtype, tensor.shape, tensor.stride())

    def lies_like(self, strides: tuple[int, ...]) -> bool:
        """Return True if `strides` lead to the same places in memory; strides of dimensions of size
        1 do not matter.
        """
        pairs = zip(self.shape, self.strides, strides, strict=True)
        return self.shape.numel() == 0 or all(
            size == 1 or own == other for size, own, other in pairs
        )

    def __str__(self) -> str:
        contiguous = (
            tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1] if self.shape else ()
        )
        strides = "" if self.lies_like(contiguous) else f" with strides {self.strides}"
        return f"{str(self.dtype)[6:]}{list(self.shape)}{strides}"


def bucket_description(
    index: int, wire: AnyWire, names: Iterable[str], kinds: Iterable[TensorKind]
) -> str:
    """Return everything about a bucket that must agree between ranks, as text."""
    members = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    travels = repr(wire) if is_quantized(wire) else str(wire)[6:]
    return f"bucket {index} ({travels}): {members}"
