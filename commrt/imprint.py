# SPDX-License-Identifier: Apache-2.0
"""Enough of parameters to notice that a user's loop has changed them outside of an optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Imprint"]

LOOKED_AT, PLACES = 8, 8
"""Of the largest parameters, and of each so many values: who averages, perturbs or loads weights changes them all."""


class Imprint:
    """Of `params` as they were when it was taken. What was changed and put back has not changed.

    >>> weight = torch.zeros(3)
    >>> imprint = Imprint([weight])
    >>> weight.data += 1
    >>> imprint.fits
    False
    >>> weight.data -= 1
    >>> imprint.fits
    True
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        largest = [param for param in sorted(params, key=Tensor.numel)[-LOOKED_AT:] if param.numel()]
        self._looked_at = [(param, _places(param)) for param in largest]
        self.take()

    def take(self) -> None:
        """They are what they should be now."""
        self._values = self._seen()

    @property
    def fits(self) -> bool:
        """True if they are what they were; waits for the GPU that they are on."""
        return torch.equal(self._seen(), self._values)

    @property
    def writes(self) -> int:
        """How often they have been written to, as autograd counts; not through ``param.data``."""
        return sum(param._version for param in self._params)  # noqa: SLF001

    def _seen(self) -> Tensor:
        """As bytes: one that is no number is equal to itself."""
        values = [param.detach().take(places).view(torch.uint8) for param, places in self._looked_at]
        return torch.cat(values) if values else torch.empty(0, dtype=torch.uint8)


def _places(param: Tensor) -> Tensor:
    return torch.linspace(0, param.numel() - 1, PLACES, dtype=torch.float64).long().to(param.device)
