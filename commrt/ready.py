# SPDX-License-Identifier: Apache-2.0
"""In which order buckets leave: always their own, whatever order gradients become ready in (invariant 3)."""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import UsageError

__all__ = ["LaunchOrder"]


class LaunchOrder:
    """Counts the gradients of one backward pass; answers which buckets may leave.

    >>> order = LaunchOrder([("b.weight", "b.bias"), ("a.weight",)])
    >>> order.mark(1, "a.weight"), order.mark(0, "b.bias"), order.mark(0, "b.weight")
    ([], [], [0, 1])
    """

    def __init__(self, members: Sequence[Sequence[str]]) -> None:
        self._members = [frozenset(names) for names in members]
        self.arm()

    def arm(self) -> None:
        """Start a backward pass: no gradient is ready."""
        self._missing = [set(names) for names in self._members]
        self._next = 0

    def mark(self, bucket: int, name: str) -> list[int]:
        """Gradient `name` of `bucket` is ready: the buckets that may leave now, in order."""
        if name not in self._missing[bucket]:
            raise UsageError(
                f"the gradient of {name} became ready twice in one backward pass. Reentrant activation "
                "checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        self._missing[bucket].remove(name)
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return list(range(first, self._next))

    def rest(self) -> list[int]:
        """The backward pass has ended: the buckets that have not left yet."""
        first, self._next = self._next, len(self._missing)
        return list(range(first, self._next))
