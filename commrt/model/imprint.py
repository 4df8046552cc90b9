# SPDX-License-Identifier: Apache-2.0
"""Enough of parameters to notice that a user's loop has changed them outside of an optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Imprint"]

LOOKED_AT = 4096
"""Of more parameters the largest: on a CPU each takes 4 us."""


class Imprint:
    """Of `params` as they were when it was taken: their norms. What was changed and put back has not changed.

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
        self._params = list(params)
        largest = sorted(params, key=Tensor.numel)[-LOOKED_AT:]
        kinds = {param.dtype for param in largest}
        self._alike = [[param for param in largest if param.dtype == kind] for kind in kinds]
        self.take()

    def take(self) -> None:
        """They are what they should be now; reads all of them once."""
        self._norms = self._seen()

    @property
    def fits(self) -> bool:
        """True if they are what they were; waits for the GPU that they are on."""
        return torch.equal(self._seen(), self._norms)

    @property
    def writes(self) -> int:
        """How often they have been written to, as autograd counts; not through ``param.data``."""
        return sum(param._version for param in self._params)  # noqa: SLF001

    def _seen(self) -> Tensor:
        """As bytes: a norm that is no number is equal to itself."""
        with torch.no_grad():
            parts = [_norms(params).view(torch.uint8) for params in self._alike]
            return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _norms(params: list[Tensor]) -> Tensor:
    """In 16 bits a norm would round too much away; a CPU makes a wider copy first, so there one after the other."""
    wide = torch.float32 if params[0].itemsize < torch.float32.itemsize else None
    if wide is None or params[0].is_cuda:
        return torch.stack(torch._foreach_norm(params, 2, wide))  # noqa: SLF001  # all at once
    norms = torch.empty(len(params), dtype=wide, device="cpu")
    for norm, param in zip(norms, params, strict=True):
        norm.copy_(torch.linalg.vector_norm(param, dtype=wide))
    return norms
