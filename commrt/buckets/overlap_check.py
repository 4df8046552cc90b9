# SPDX-License-Identifier: Apache-2.0
"""Finds gradients that share memory, which would be averaged twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import add, gt, itemgetter

from torch import Tensor

from commrt.errors import UsageError

Block = tuple[int, int, str]
"""Address, bytes and name of a gradient."""


class OverlapCheck:
    """Finds gradients that share memory, which would be averaged twice; one for all buckets of a
    model.

    It compares addresses when the last bucket of a step is taken: that is not sent then, so no rank
    completes the step. It reads addresses only, and is called by buckets, on the thread that takes
    their gradients.
    """

    def __init__(self) -> None:
        self._wires: list[range] = []  # addresses of gradients that live on the wire
        self._buckets = 0
        self._left = 0  # buckets that were not taken in this step
        self._taken: dict[int, Sequence[Block]] = {}

    def expect_bucket(self) -> None:
        """Wait for one more bucket in each step before anything is compared."""
        self._buckets += 1

    def check(self, bucket: int, blocks: Sequence[Block]) -> None:
        """Raise `UsageError` if a gradient of `bucket` shares memory with one of this step."""
        if not self._taken or bucket in self._taken:  # the next step
            self._taken = {}
            self._left = self._buckets
        self._taken[bucket] = blocks
        self._left -= 1
        if not self._left:
            in_order = sorted(chain.from_iterable(self._taken.values()))
            begins = [*map(itemgetter(0), in_order)]
            ends = map(add, begins, map(itemgetter(1), in_order))
            if True in map(gt, ends, begins[1:]):
                _refuse([block for block in in_order if block[1]])

    def claim(self, wire: Tensor) -> None:
        """Note that gradients live on `wire`, each at its own place."""
        self._wires.append(range(wire.data_ptr(), wire.data_ptr() + wire.nbytes))

    def are_apart(self, grads: Sequence[Tensor]) -> bool:
        """Return True if none of `grads` lies where gradients live."""
        addresses = [*map(Tensor.data_ptr, grads)]
        return not any(True in map(wire.__contains__, addresses) for wire in self._wires)

    def require_apart(self, name: str, grad: Tensor) -> None:
        """Raise `UsageError` if the gradient of `name`, which is not at its place, lies where
        gradients live.
        """
        if any(grad.data_ptr() in wire for wire in self._wires):
            raise UsageError(
                f"the gradient of {name} was given memory of another gradient that travels: use a"
                " .clone()"
            )


def _refuse(in_order: Sequence[Block]) -> None:
    """Raise `UsageError` if one of the blocks, none of them empty, reaches into the next one."""
    for (begin, nbytes, name), (following, _, other) in pairwise(in_order):
        if begin + nbytes > following:
            raise UsageError(
                f"the gradients of {name} and {other} share memory: use a .clone() of one"
            )
