# SPDX-License-Identifier: Apache-2.0
"""What is made once and belongs to a generation of ranks: bound exchanges, and memory to send from.

Exchanges are proven, compared by ranks and bound to memory when they are new, then only run. Here
they are found, kept and forgotten; their users do the rest. See `Prepared` for threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from commrt.runtime.comparison import Claim
from commrt.runtime.generation import Members
from commrt.runtime.membership import Membership

T = TypeVar("T")
KEPT = 256
"""Exchanges that are kept, unless a kind says otherwise."""
COMPARISONS_KEPT = 256
"""Comparisons that each set of ranks remembers."""


class HasMembership(Protocol):
    """A world, as far as it says which generation runs."""

    membership: Membership


class Prepared(Generic[T]):
    """The exchanges of one kind, each found by its key: all that it was made of.

    Who finds none (`known`) proves its schedule, lets ranks compare it (`compare_once`), binds it
    to memory, and keeps it (`keep`); who finds one only runs it. The latest `kept` are kept.

    The ranks of a claim compare, remember and forget the same claims in the same order, whatever
    each of them has bound: when claims are forgotten, so is all that is bound, so what is bound was
    compared. A new generation has other connections, and perhaps a rank that was not there before:
    it begins with nothing. Memory to send from is kept here, too: after connections broke, a peer
    may still read what it was sent.

    One thread at a time writes here, but for what says otherwise. For bound exchanges it is the
    communication thread, or the caller's in its place. `known` is for any thread.
    """

    def __init__(self, world: HasMembership, kept: int = KEPT) -> None:
        self._world = world  # of which the number of the generation is read
        self._kept = kept
        # these are set by `forget`, and only there made anew
        self._generation: int
        self._bound: dict[tuple[Hashable, ...], T]
        self._compared: dict[Members, set[str]]
        self.forget()

    def forget(self) -> None:
        """Let go of all memory, and begin anew; on all ranks alike, if they compare.

        On any thread, if no task runs.
        """
        self._generation = self._world.membership.number
        self._bound = {}
        self._compared = {}

    def forget_bound(self) -> None:
        """Let go of all memory. A rank may do so alone."""
        self._bound.clear()

    def forget_one(self, *key: Hashable) -> None:
        """Let go of one exchange, if it is there. A rank may do so alone, on any thread."""
        self._bound.pop(key, None)

    @property
    def is_current(self) -> bool:
        """False if all that is here belongs to a generation that has ended. On any thread."""
        return self._generation == self._world.membership.number

    def known(self, *key: Hashable) -> T | None:
        """Return the exchange if it is prepared, else None. On any thread."""
        if self._generation != self._world.membership.number:  # `is_current`, at one call less
            return None
        return self._bound.get(key)

    def compare_once(self, claim: Claim, compare: Callable[[Claim], object]) -> None:
        """Call ``compare(claim)``, which raises unless its ranks agree, if it is new to them."""
        if not self.is_current:
            self.forget()
        known = self._compared.setdefault(claim.ranks, set())
        if claim.text in known:
            return
        compare(claim)
        if len(known) == COMPARISONS_KEPT:  # all ranks forget at the same call
            known.clear()
            self.forget_bound()
        known.add(claim.text)

    def keep(self, exchange: T, *key: Hashable) -> T:
        """Keep `exchange`, which was proven, compared and bound, and return it.

        On any thread, if no task runs.
        """
        if not self.is_current:
            self.forget()
        while len(self._bound) >= self._kept:
            oldest, *_ = self._bound
            self.forget_one(*oldest)
        self._bound[key] = exchange
        return exchange
