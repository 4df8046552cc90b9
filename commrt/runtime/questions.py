# SPDX-License-Identifier: Apache-2.0
"""Questions to all ranks of a world, numbered alike on each, so that none is taken for another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store

from commrt.members.survival import Survival
from commrt.runtime.comparison import Comparison
from commrt.store.agreement import agree, tell_of_leaving
from commrt.transport.media import Media

__all__ = ["Questions"]


class Questions:
    """Of one world. They are asked on the store, or on the transport where a rank may be lost meanwhile."""

    def __init__(self, transport: Media, survival: Survival, comparison: Comparison) -> None:
        self._transport, self._survival, self._comparison = transport, survival, comparison
        self._latest = (0, 0)  # a generation, and how many there were in it

    def ask(self, store: Store, topic: str, claim: Mapping[str, str]) -> None:
        """See `commrt.store.agreement.agree`, of those who are left."""
        if self._survival.is_possible and self._all_have(f"{topic} {sorted(claim.items())}"):
            return
        self._latest = self._next()
        members, timeout_s = self._survival.membership.members, self._transport.timeout_s
        agree(store, self._transport.rank, members, topic, claim, timeout_s, self.shelf)

    @property
    def shelf(self) -> str:
        """A name that belongs to the latest question."""
        return _named(self._latest)

    def end_next(self, store: Store, reason: BaseException) -> None:
        """For the others: this rank will not come to it."""
        tell_of_leaving(PrefixStore(_named(self._next()), store), self._transport.rank, reason)

    def _all_have(self, claim: str) -> bool:
        """True if all who are left came with the same `claim`, whoever is lost meanwhile."""
        mark, survival = hashlib.sha256(claim.encode()).hexdigest(), self._survival
        compare = self._comparison.are_same_now
        return survival.together(lambda: survival.submit(lambda: compare(mark, survival.membership.members)).result())

    def _next(self) -> tuple[int, int]:
        """One that a lost rank can no longer reach, and who came later counts from the same."""
        generation, (latest, number) = self._survival.membership.generation, self._latest
        return generation, number + 1 if generation == latest else 1


def _named(question: tuple[int, int]) -> str:
    return "agreement {}.{}".format(*question)
