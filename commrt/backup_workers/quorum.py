# SPDX-License-Identifier: Apache-2.0
"""The quorum protocol: the first N announced gradients count in a step, decided once and identically for all ranks.

`quorum_step` is one rank's part of a step, as a generator: it yields operations on the store and on the other ranks,
and receives their results. So the rules that run are those that were model-checked, in every order of events and with
a death at every instant (``tests/test_quorum.py``). `commrt.backup_workers.quorum_vote` executes them.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, section 3.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

__all__ = [
    "DONE",
    "FAILED",
    "NO_MEMBERS",
    "OLDEST_STEP",
    "Announcement",
    "Append",
    "NextAttempt",
    "Operation",
    "QuorumStep",
    "ReadNow",
    "Reduce",
    "SetOnce",
    "StepOutcome",
    "WaitFor",
    "choose_members",
    "parse_announcements",
    "quorum_key",
    "quorum_step",
]

DONE, FAILED = "done", "failed"
"""How an attempt ended."""
NO_MEMBERS = "void"
"""In place of members: no gradient counts in this attempt."""
OLDEST_STEP = "floor"
"""The key of the oldest step whose keys the store still has."""


class Append(NamedTuple):
    """Append a word to the text under `key`; no result."""

    key: str
    word: str


class SetOnce(NamedTuple):
    """Write `value` under `key` unless something is there; the result is what stands there."""

    key: str
    value: str


class ReadNow(NamedTuple):
    """Read all `keys`, which exist, at one instant or in this order; the result is their texts."""

    keys: tuple[str, ...]


class WaitFor(NamedTuple):
    """Wait until `key` is written; the result is its text, or None if it was deleted since.

    The rank that waits probes those that should write it, and writes it itself if they will not: FAILED if a member is
    gone, NO_MEMBERS if too few ranks are left to announce.
    """

    key: str
    step: int
    attempt: int
    members: tuple[int, ...] = ()
    """The ranks it waits for; empty if any may write it."""


class Reduce(NamedTuple):
    """Sum the gradients of `members`, including this rank's, without using the sum; the result is True on success.

    For the first member: True if all members have the sum.
    """

    step: int
    attempt: int
    members: tuple[int, ...]


class NextAttempt(NamedTuple):
    """Move to `generation` or a later one; the result is its number, or None if another attempt makes no sense."""

    generation: int


Operation = Append | SetOnce | ReadNow | WaitFor | Reduce | NextAttempt


class StepOutcome(NamedTuple):
    """How a step ended; equal on all ranks except `counts` and `place`."""

    members: tuple[int, ...]
    """The ranks whose gradients were applied; empty if the store has deleted that, or none were."""
    counts: bool
    """True if this rank was a member, and has the sum."""
    attempt: int
    notes: tuple[str, ...] = ()
    """The note of each member on its gradient."""
    is_over: bool = True
    """False if the step must still be done."""
    place: int = 0
    """How many ranks announced before this one."""


QuorumStep = Generator[Operation, Any, StepOutcome]


def quorum_key(step: int, attempt: int, what: str) -> str:
    """Return the key of `what` of one attempt."""
    return f"{step}.{attempt}/{what}"


class Announcement(NamedTuple):
    """One word of the list of ready gradients."""

    rank: int
    """The rank whose gradient is ready."""
    generation: int
    """The generation in which that rank can reduce."""
    note: str
    """What the rank says about its gradient, without blanks and ``@``."""

    def __str__(self) -> str:
        return "@".join(map(str, self))

    @classmethod
    def parse(cls, word: str) -> Announcement:
        """Raise `ValueError` unless `word` names a rank and a generation."""
        rank, generation, note = word.split("@")
        if int(rank) < 0 or int(generation) < 0:
            raise ValueError("ranks and generations are numbers from 0 on")
        return cls(int(rank), int(generation), note)


def parse_announcements(text: str, generation: int) -> list[Announcement]:
    """Return the announcements of `generation`, in the order in which they were made.

    >>> [word.rank for word in parse_announcements("3@0@ 1@1@ 0@0@ ", generation=0)]
    [3, 0]
    """
    return [Announcement.parse(word) for word in text.split() if f"@{generation}@" in word]


def choose_members(words: list[Announcement], needed: int) -> str:
    """Return the members as text: the first `needed` announcements, by rank.

    >>> choose_members(parse_announcements("3@0@c 0@0@a 2@0@b", 0), needed=2)
    '0@0@a 3@0@c'
    """
    return " ".join(map(str, sorted(words[:needed])))


def quorum_step(rank: int, generation: int, needed: int, step: int, attempt: int = 0, note: str = "") -> QuorumStep:
    """Yield the operations of `rank`, whose gradient is ready, until `needed` gradients are applied in `step`.

    One attempt: announce; the first `needed` announcements are the members; they reduce; the step is done when all have
    the sum. An attempt that loses a member fails for all: the survivors announce again, with the gradients still in
    memory. A rank that is not a member waits for the end, because its gradient may count if the attempt fails. Only
    ranks of one `generation` can reduce together; a rank that has missed one is late. Costs four store operations.
    """
    while True:
        written = quorum_key(step, attempt, "announced")
        mine = Announcement(rank, generation, note)
        yield Append(written, f"{mine} ")
        floor, text = yield ReadNow((OLDEST_STEP, written))
        if step < int(floor):
            return StepOutcome((), counts=False, attempt=attempt)
        order = parse_announcements(text, generation)
        chosen = yield from _chosen(order, needed, step, attempt)
        if chosen is None:
            return StepOutcome((), counts=False, attempt=attempt)
        members = tuple(word.rank for word in chosen)
        # The whole announcement is compared: the dead process of this rank may have been a member.
        is_member = mine in chosen
        is_first = is_member and rank == members[0]
        outcome = (yield from _outcome(is_member, is_first, step, attempt, members)) if members else FAILED
        if not outcome:
            return StepOutcome((), counts=False, attempt=attempt)
        if outcome == DONE:
            notes, place = tuple(word.note for word in chosen), [word.rank for word in order].index(rank)
            return StepOutcome(members, is_member, attempt, notes, place=place)
        attempt += 1
        agreed = yield NextAttempt(chosen[0].generation + 1 if chosen else generation)
        if agreed is None:
            return StepOutcome((), counts=False, attempt=attempt, is_over=False)
        generation = agreed


def _chosen(
    order: list[Announcement], needed: int, step: int, attempt: int
) -> Generator[Operation, Any, list[Announcement] | None]:
    """Return the members: empty if the attempt came to nothing, None if the store has deleted them."""
    members = quorum_key(step, attempt, "members")
    is_complete = len(order) >= needed
    text = yield SetOnce(members, choose_members(order, needed)) if is_complete else WaitFor(members, step, attempt)
    if not text:
        return None
    return [] if text == NO_MEMBERS else [Announcement.parse(word) for word in text.split()]


def _outcome(
    is_member: bool, is_first: bool, step: int, attempt: int, members: tuple[int, ...]
) -> Generator[Operation, Any, str]:
    """Return DONE or FAILED; empty if the store has deleted it."""
    outcome = quorum_key(step, attempt, "outcome")
    if is_member:
        went_well = yield Reduce(step, attempt, members)
        if is_first or not went_well:
            stands: str = yield SetOnce(outcome, DONE if went_well else FAILED)
            return stands
    stands = yield WaitFor(outcome, step, attempt, members)
    return stands
