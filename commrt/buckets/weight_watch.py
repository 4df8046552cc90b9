# SPDX-License-Identifier: Apache-2.0
"""Notice that somebody has written to weights whose values an exchange relies on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commrt.errors import UsageError

__all__ = ["WeightWatch"]

MOST_LOOKED_AT = 256
"""So many values of each tensor are compared, evenly spaced."""


class WeightWatch:
    """Remembers parameters as they are, and finds one that was written since.

    A write that autograd counts is always seen, unless it may be put back. Others, such as those through ``.data``, are
    seen by the values that are compared, on a CPU; on a GPU the host would have to wait for them.
    """

    def __init__(self, places: Sequence[tuple[str, Mapping[str, Tensor | None], str]]) -> None:
        """Watch what lies at `places`: of each parameter its name, the dict that holds it, and the key there."""
        self._places = places
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._views: list[Tensor] = []  # of the values that are compared
        self._values: Tensor | None = None

    def note(self) -> None:
        """Remember the parameters as they are now; on a GPU in stream order."""
        tensors = self._tensors()
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [_spaced(tensor) for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001  # as autograd's notes name it
        self._values = torch.cat(self._views) if self._views else None

    def written(self, *, may_be_put_back: bool) -> str | None:
        """Return the name of a parameter that was written or lies elsewhere since `note`, or None.

        With `may_be_put_back` one that has its values again counts as unchanged.
        """
        if self._values is None:
            return None
        tensors = self._tensors()
        addresses = [tensor.data_ptr() for tensor in tensors]
        versions = [tensor._version for tensor in tensors]  # noqa: SLF001
        is_touched = (versions, addresses) != (self._versions, self._addresses)
        if is_touched and not may_be_put_back:
            now, before = zip(versions, addresses, strict=True), zip(self._versions, self._addresses, strict=True)
            return self._name_of([one != other for one, other in zip(now, before, strict=True)])
        if self._values.is_cuda and not is_touched:
            return None
        views = self._views if addresses == self._addresses else [_spaced(tensor) for tensor in tensors]
        if torch.equal(torch.cat(views), self._values):
            return None
        noted = torch.split(self._values, [len(view) for view in self._views])
        return self._name_of([_differ(now, before) for now, before in zip(views, noted, strict=True)])

    def _tensors(self) -> list[Tensor]:
        try:
            return [held[key] for _, held, key in self._places]  # type: ignore[misc]
        except KeyError:
            gone = next(name for name, held, key in self._places if key not in held)
            raise UsageError(f"{gone} is gone: detach() and attach() again after changing the model") from None

    def _name_of(self, changed: Sequence[bool]) -> str | None:
        return next((name for (name, _, _), is_so in zip(self._places, changed, strict=True) if is_so), None)


def _spaced(tensor: Tensor) -> Tensor:
    """Return a view of at most `MOST_LOOKED_AT` elements; of none where memory has gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.detach().permute(order)
    if not dense.is_contiguous():
        return tensor.detach().new_empty(0)
    return dense.view(-1)[:: max(-(-tensor.numel() // MOST_LOOKED_AT), 1)]


def _differ(now: Tensor, before: Tensor) -> bool:
    """Return True unless both have the same values, where NaN equals NaN."""
    return now.shape != before.shape or not torch.allclose(now.to(before.dtype), before, rtol=0, atol=0, equal_nan=True)
