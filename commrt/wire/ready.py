# SPDX-License-Identifier: Apache-2.0
"""In which order buckets leave: always their own, whatever order gradients become ready in (invariant 3)."""

from __future__ import annotations

from collections.abc import Sequence

from commrt.errors import UsageError

__all__ = ["LaunchOrder"]


class LaunchOrder:
    """Counts the gradients of one backward pass; answers which buckets may leave.

    >>> order = LaunchOrder([("b.weight", "b.bias"), ("a.weight",)])
    >>> order.mark("a.weight"), order.mark("b.bias"), order.mark("b.weight")
    ([], [], [0, 1])
    >>> order.seen
    ['a.weight', 'b.bias', 'b.weight']
    """

    def __init__(self, members: Sequence[Sequence[str]]) -> None:
        self._members = [frozenset(names) for names in members]
        self._bucket_of = {name: bucket for bucket, names in enumerate(members) for name in names}
        self.arm()

    def arm(self) -> None:
        """Start a backward pass: no gradient is ready."""
        self._missing = [set(names) for names in self._members]
        self._next = 0
        self.seen: list[str] = []
        """Gradients in the order in which they became ready in this pass."""

    def mark(self, name: str) -> list[int]:
        """The gradient `name` is ready: the buckets that may leave now, in order."""
        bucket = self._bucket_of[name]
        if name not in self._missing[bucket]:
            raise UsageError(
                f"the gradient of {name} became ready twice in one backward pass. Reentrant activation "
                "checkpointing does that: use checkpoint(..., use_reentrant=False)"
            )
        self._missing[bucket].remove(name)
        self.seen.append(name)
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return list(range(first, self._next))

    def is_ready(self, name: str) -> bool:
        """True if `mark` was told so in this pass."""
        return name not in self._missing[self._bucket_of[name]]

    def rest(self) -> list[int]:
        """The backward pass has ended: the buckets that have not left yet."""
        first, self._next = self._next, len(self._missing)
        return list(range(first, self._next))
