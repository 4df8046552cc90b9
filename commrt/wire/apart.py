# SPDX-License-Identifier: Apache-2.0
"""Gradients lie apart: two in one place would be averaged twice, or half."""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import UsageError
from commrt.kernels.layout import overlap

__all__ = ["Apart"]


class Apart:
    """Where the buckets of a model have taken gradients from in a step; a bucket that comes again begins the next.

    Compares while a gradient has moved since the step before.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}
        self._taken: dict[int, tuple[Sequence[str], list[int], Sequence[int]]] = {}
        self._moved = False

    def require(self, bucket: int, names: Sequence[str], addresses: list[int], nbytes: Sequence[int]) -> None:
        """Raise `UsageError` if a gradient of `bucket` shares memory with one taken in this step; 0 for none."""
        if bucket in self._taken:
            self._taken, self._moved = {}, False
        self._taken[bucket] = names, addresses, nbytes
        self._moved = self._moved or addresses != self._known.get(bucket)
        if self._moved:
            self._compare()
        self._known[bucket] = addresses

    def _compare(self) -> None:
        taken = [piece for pieces in self._taken.values() for piece in zip(*pieces, strict=True) if piece[1]]
        if pair := overlap([address for _, address, _ in taken], [nbytes for _, _, nbytes in taken]):
            first, second = (taken[i][0] for i in pair)
            raise UsageError(f"the gradients of {first} and {second} share memory: use a .clone() of one")
