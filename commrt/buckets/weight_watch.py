# SPDX-License-Identifier: Apache-2.0
"""Notice that somebody has written to weights whose values an exchange relies on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["WeightWatch"]

MOST_LOOKED_AT = 256
"""So many values of each tensor are compared, evenly spaced."""


class WeightWatch:
    """Remembers tensors as they are, and finds one that was written since.

    A write that autograd counts is always seen. One through ``.data`` is seen by its values, on a CPU; on a GPU the
    host would have to wait for them.
    """

    def __init__(self) -> None:
        self._states: list[tuple[int, int]] = []
        self._views: list[Tensor] = []  # of the values that are compared
        self._values: Tensor | None = None

    def note(self, tensors: Sequence[Tensor]) -> None:
        """Remember `tensors` as they are now; on a GPU in stream order."""
        states = [_state(tensor) for tensor in tensors]
        if [place for _, place in states] != [place for _, place in self._states]:
            self._views = [_spaced(tensor) for tensor in tensors]
        self._states, self._values = states, torch.cat(self._views) if self._views else None

    def written(self, tensors: Sequence[Tensor], *, may_be_put_back: bool) -> int | None:
        """Return the place in `tensors` of one that was written or lies elsewhere since `note`, or None.

        With `may_be_put_back` a tensor that has its values again counts as unchanged.
        """
        states = [_state(tensor) for tensor in tensors]
        pairs = enumerate(zip(states, self._states, strict=True))
        touched = next((i for i, (now, before) in pairs if now != before), None)
        if touched is not None and not may_be_put_back:
            return touched
        if self._values is None or (self._values.is_cuda and touched is None):
            return None
        return self._first_change(self._views if touched is None else [_spaced(tensor) for tensor in tensors])

    def _first_change(self, views: Sequence[Tensor]) -> int | None:
        """Return the place of the first of `views` that has other values than before, where NaN equals NaN."""
        assert self._values is not None  # noqa: S101  # for mypy
        if torch.equal(torch.cat([*views]), self._values):
            return None
        noted = torch.split(self._values, [len(view) for view in self._views])
        return next((i for i, (now, before) in enumerate(zip(views, noted, strict=True)) if _differ(now, before)), None)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return how often autograd has seen a write, and the place in memory."""
    return tensor._version, tensor.data_ptr()  # noqa: SLF001  # as autograd's notes name it


def _spaced(tensor: Tensor) -> Tensor:
    """Return a view of at most `MOST_LOOKED_AT` elements; of none where memory has gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        return tensor.detach().new_empty(0)
    return dense.view(-1)[:: max(-(-tensor.numel() // MOST_LOOKED_AT), 1)]


def _differ(now: Tensor, before: Tensor) -> bool:
    return now.shape != before.shape or not torch.allclose(now.to(before.dtype), before, rtol=0, atol=0, equal_nan=True)
