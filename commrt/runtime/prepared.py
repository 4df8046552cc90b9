# SPDX-License-Identifier: Apache-2.0
"""Prepared exchanges: proven, compared between ranks and bound to memory when they are new, and
then only run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from commrt.errors import UsageError
from commrt.kernels.layout import GRANULE
from commrt.program import chunk_bounds
from commrt.runtime.membership import Membership
from commrt.schedule import Algorithm, Schedule
from commrt.transport.protocol import Tag

T = TypeVar("T")
KEPT = 256
"""Exchanges that are kept, unless a kind says otherwise: those that were prepared last."""
COMPARISONS_KEPT = 256
"""Comparisons that each set of ranks remembers."""
SCHEDULES_KEPT = 16

Members = tuple[int, ...] | None
"""``members[i]`` plays rank i of a schedule; None if the ranks of the world play themselves."""


class HasMembership(Protocol):
    """A world, as far as it says which generation runs."""

    membership: Membership


class Claim(NamedTuple):
    """What `ranks` compare before an exchange of theirs runs for the first time."""

    ranks: tuple[int, ...]
    text: str


Compare = Callable[[Claim, Schedule, int], None]
"""(claim, schedule, step): raises unless all ranks of the claim come with it.

On the communication thread.
"""


class Prepared(Generic[T]):
    """The exchanges of one kind, each made once from a schedule, the members that play it, and the
    memory it uses.

    `prove` sees each schedule once, and `compare` each claim once, before `bind` makes the
    exchange. Whoever finds one here only runs it. The ranks of a claim compare, remember and forget
    the same claims in the same order, whatever each of them has bound: when claims are forgotten,
    so is all that is bound, so what is bound was compared. A new generation has other connections,
    and perhaps a rank that was not there before: it begins with nothing.
    """

    def __init__(
        self,
        world: HasMembership,
        bind: Callable[[Schedule, Members, Any], T],
        *,
        prove: Callable[[Schedule], object] = lambda _: None,
        claim: Callable[[Schedule, Members, Any], Claim | None] = lambda *_: None,
        compare: Compare = lambda *_: None,
        kept: int = KEPT,
    ) -> None:
        self._world = world
        self._bind = bind
        self._claim = claim
        self._compare = compare
        self._kept = kept
        self.prove = lru_cache(KEPT)(prove)
        """Raises unless a schedule does what it must. On any thread."""
        self.shortcuts: dict[Hashable, Any] = {}
        """What callers note of these exchanges, to run them unasked: empty again when one of them
        is let go of.
        """
        self.forget()

    def forget(self) -> None:
        """Let go of all memory, and begin anew; on all ranks alike, if they compare."""
        self.shortcuts = {}
        self._generation = self._world.membership.number
        self._bound: dict[tuple[Schedule, Members, Hashable], T] = {}
        self._compared: dict[tuple[int, ...], set[str]] = {}

    def forget_bound(self) -> None:
        """Let go of all memory. A rank may do so alone."""
        self.shortcuts = {}
        self._bound.clear()

    def forget_one(self, schedule: Schedule, members: Members, memory: Hashable) -> None:
        """Let go of one exchange, if it is there. A rank may do so alone, on any thread."""
        self.shortcuts = {}
        self._bound.pop((schedule, members, memory), None)

    def known(self, schedule: Schedule, members: Members, memory: Hashable) -> T | None:
        """Return the exchange if it is prepared, else None. On any thread."""
        is_current = self._generation == self._world.membership.number
        return self._bound.get((schedule, members, memory)) if is_current else None

    def get(self, schedule: Schedule, members: Members, memory: Hashable, step: int = 0) -> T:
        """Return the exchange, prepared now if it is new; `step` is for `compare`.

        On the communication thread.
        """
        if self._generation == self._world.membership.number:  # as `known` asks, at one call less
            found = self._bound.get((schedule, members, memory))
            if found is not None:
                return found
        return self._prepare(schedule, members, memory, step)

    def _prepare(self, schedule: Schedule, members: Members, memory: Any, step: int) -> T:
        if self._generation != self._world.membership.number:
            self.forget()
        self.prove(schedule)
        if claim := self._claim(schedule, members, memory):
            self._compare_once(claim, schedule, step)
        bound = self._bind(schedule, members, memory)
        while len(self._bound) >= self._kept:
            self.shortcuts = {}
            self._bound.pop(next(iter(self._bound)), None)
        self._bound[schedule, members, memory] = bound
        return bound

    def _compare_once(self, claim: Claim, schedule: Schedule, step: int) -> None:
        known = self._compared.setdefault(claim.ranks, set())
        if claim.text in known:
            return
        self._compare(claim, schedule, step)
        if len(known) == COMPARISONS_KEPT:  # all ranks forget at the same call
            known.clear()
            self.forget_bound()
        known.add(claim.text)


class Traits(NamedTuple):
    """What a comparison needs of a schedule."""

    digest: str
    ranks: tuple[int, ...]
    """Those that send or receive."""
    combines: frozenset[int]


@lru_cache(SCHEDULES_KEPT)
def traits_of(schedule: Schedule) -> Traits:
    """Return the traits of `schedule`.

    They are remembered by object, which is kept alive meanwhile.
    """
    ranks: set[int] = set()
    combines: set[int] = set()
    for step in schedule.checked_steps():
        moved = step.canonical()
        ranks.update(chain(moved.src.tolist(), moved.dst.tolist()))
        combines.update(moved.combine.tolist())
    return Traits(schedule.digest(), tuple(sorted(ranks)), frozenset(combines))


def cut(schedule: Schedule, row: Tensor) -> list[int]:
    """Return the bounds of the chunks of `row`, which are equal if it divides."""
    return chunk_bounds(
        row.numel(), schedule.chunks, granule=GRANULE if row.numel() % schedule.chunks else 1
    )


def schedule_of(algorithm: Algorithm, step: int, ranks: int) -> Schedule:
    """Return the schedule of training step `step`; raises `UsageError` if it is none of so many
    `ranks`.
    """
    schedule = algorithm.schedule(step, ranks)
    if not isinstance(schedule, Schedule) or schedule.ranks != ranks:
        raise UsageError(
            f"{algorithm} made {schedule!r:.80} for {ranks} ranks, which is no schedule of them"
        )
    return schedule


def check_tag(tag: Tag) -> None:
    """Raise `UsageError` unless `tag` is one."""
    if not isinstance(tag, Tag):
        raise UsageError(f"tag={tag!r:.80}: give a commrt.Tag(step, bucket), or leave it out")
