# SPDX-License-Identifier: Apache-2.0
"""Whose gradients count in a step: the first N that are announced, decided once and seen identically by all.

A step as one rank goes through it is a generator, `deliberate`: it yields what it wants of the store and of the other
ranks, and is sent the answers. So the rules that run are the rules that were checked, in every order of events and with
a death at every instant (``tests/test_quorum.py``). `commrt.membership.quorum_vote` carries them out.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, section 3.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

__all__ = [
    "DONE",
    "FAILED",
    "FLOOR",
    "VOID",
    "Again",
    "Announcement",
    "Append",
    "Deliberation",
    "Outcome",
    "Read",
    "Reduce",
    "Settle",
    "Survey",
    "Wish",
    "announced",
    "checked",
    "deliberate",
    "first",
    "key",
]

DONE, FAILED = "done", "failed"
"""How an attempt ended."""
VOID = "void"
"""In place of members: nobody's gradients count in this attempt."""
FLOOR = "floor"
"""The key of the first step of which the store still knows everything."""


class Append(NamedTuple):
    """Add a word to the text under `key`; answers nothing."""

    key: str
    word: str


class Settle(NamedTuple):
    """Write `value` unless something is written there: the first stands; answers what stands."""

    key: str
    value: str


class Survey(NamedTuple):
    """Answers what is written under each of `keys`, all of which exist, at one instant or in this order."""

    keys: tuple[str, ...]


class Read(NamedTuple):
    """Answers what is written under `key`, once something is; nothing if it was forgotten since.

    Who waits looks after those it waits for meanwhile, and settles the matter if they will not: an attempt as failed
    if a member is gone, its members as nobody if too few are left to announce.
    """

    key: str
    step: int
    attempt: int
    members: tuple[int, ...] = ()
    """Whom it waits for; nobody in particular if empty."""


class Reduce(NamedTuple):
    """Add up the gradients of `members`, this rank's too, without using the sum; answers whether that went well.

    For the first member: whether all members have the sum.
    """

    step: int
    attempt: int
    members: tuple[int, ...]


class Again(NamedTuple):
    """Be in `generation` or a later one; answers in which, or None if there is no sense in another attempt."""

    generation: int


Wish = Append | Settle | Survey | Read | Reduce | Again


class Outcome(NamedTuple):
    """How a step ended; the same for all but for `counts` and `place`."""

    members: tuple[int, ...]
    """Whose gradients were applied; empty if nobody remembers, or nobody's were."""
    counts: bool
    """This rank was a member, and has the sum."""
    attempt: int
    notes: tuple[str, ...] = ()
    """What each member said of its gradient."""
    is_over: bool = True
    """False if the step has still to be done."""
    place: int = 0
    """How many had announced before this rank."""


Deliberation = Generator[Wish, Any, Outcome]


def key(step: int, attempt: int, what: str) -> str:
    """Where the store keeps it."""
    return f"{step}.{attempt}/{what}"


class Announcement(str):
    """A word of the list of those whose gradients are ready; it is taken apart only where that is asked for."""

    __slots__ = ()

    @classmethod
    def of(cls, rank: int, generation: int, note: str) -> Announcement:
        """`note` is what `rank` says of its gradient; without blanks and ``@``."""
        return cls(f"{rank}@{generation}@{note}")

    @property
    def rank(self) -> int:
        """Whose."""
        return int(self.partition("@")[0])

    @property
    def generation(self) -> int:
        """In which it can reduce."""
        return int(self.split("@")[1])

    @property
    def note(self) -> str:
        """What is said of the gradient."""
        return self.rpartition("@")[2]


def announced(said: str, generation: int) -> list[Announcement]:
    """Those of `generation`, in the order in which they came.

    >>> [word.rank for word in announced("3@0@ 1@1@ 0@0@ ", generation=0)]
    [3, 0]
    """
    infix = f"@{generation}@"
    return [Announcement(word) for word in said.split() if infix in word]


def checked(words: list[Announcement]) -> list[Announcement]:
    """The same; raises `ValueError` if one names no rank or no generation."""
    if any(word.rank < 0 or word.generation < 0 for word in words):
        raise ValueError("ranks and generations are numbers from 0 on")
    return words


def first(words: list[Announcement], needed: int) -> str:
    """The members, by rank, as they are settled.

    >>> first(announced("3@0@c 0@0@a 2@0@b", 0), needed=2)
    '0@0@a 3@0@c'
    """
    members = sorted(words[:needed], key=lambda word: word.rank)
    return " ".join(members)


def deliberate(rank: int, generation: int, needed: int, step: int, attempt: int = 0, note: str = "") -> Deliberation:
    """Step `step` of `rank`, whose gradient is ready, until `needed` gradients are applied.

    Each attempt: announce; the first `needed` are its members; they reduce; when all have the sum, it is done. An
    attempt that loses a member fails for all, and everybody who is left announces again, with the gradients still in
    memory. A rank that is no member waits for the end: its gradient is as good as any other if the attempt fails, and
    is dropped if it does not. Only ranks of one `generation` can reduce together; who has missed one is late.
    Costs four store operations.
    """
    while True:
        written = key(step, attempt, "announced")
        mine = Announcement.of(rank, generation, note)
        yield Append(written, f"{mine} ")
        floor, said = yield Survey((FLOOR, written))
        if step < int(floor):
            return Outcome((), counts=False, attempt=attempt)
        order = checked(announced(said, generation))
        settled = yield from _settled(order, needed, step, attempt)
        if settled is None:
            return Outcome((), counts=False, attempt=attempt)
        members = tuple(word.rank for word in settled)
        # A process that takes the place of a dead one is no member where that was.
        is_member = mine in settled
        is_first = is_member and rank == members[0]
        outcome = (yield from _outcome(is_member, is_first, step, attempt, members)) if members else FAILED
        if not outcome:
            return Outcome((), counts=False, attempt=attempt)
        if outcome == DONE:
            notes, place = tuple(word.note for word in settled), [word.rank for word in order].index(rank)
            return Outcome(members, is_member, attempt, notes, place=place)
        attempt += 1
        agreed = yield Again(settled[0].generation + 1 if settled else generation)
        if agreed is None:
            return Outcome((), counts=False, attempt=attempt, is_over=False)
        generation = agreed


def _settled(
    order: list[Announcement], needed: int, step: int, attempt: int
) -> Generator[Wish, Any, list[Announcement] | None]:
    """Empty if it came to nothing, None if that is forgotten."""
    members = key(step, attempt, "members")
    said = yield Settle(members, first(order, needed)) if len(order) >= needed else Read(members, step, attempt)
    return None if not said else [] if said == VOID else checked([Announcement(word) for word in said.split()])


def _outcome(
    is_member: bool, is_first: bool, step: int, attempt: int, members: tuple[int, ...]
) -> Generator[Wish, Any, str]:
    """Nothing if that is forgotten."""
    outcome = key(step, attempt, "outcome")
    if is_member:
        went_well = yield Reduce(step, attempt, members)
        if is_first or not went_well:
            stands: str = yield Settle(outcome, DONE if went_well else FAILED)
            return stands
    said: str = yield Read(outcome, step, attempt, members)
    return said
