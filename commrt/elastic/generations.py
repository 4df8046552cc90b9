# SPDX-License-Identifier: Apache-2.0
"""Generations: numbered lists of live ranks on the store, changed by compare-and-set only.

The key ``head`` names the current generation in a few bytes; its details stand under a key of their own, which is
written once, before the head points to it. So a generation is either the current one or not, for everybody at once.

The head also says how far the latest collective has come, so that two things follow from one compare-and-set: all
members begin a collective or none does, also if a generation ends at that instant; and no process takes the place of a
lost rank in the middle of a collective.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import NamedTuple

from commrt.runtime.membership import Loss
from commrt.store.client import TimedStore, parse, parse_int, parse_list, require

__all__ = ["GATHERING", "OPEN", "RUNNING", "Generation", "Generations", "Head"]

HEAD = "head"
OPEN, GATHERING, RUNNING = "open", "gathering", "running"
"""Of the latest collective: no rank is in it, ranks wait for the others, all members have come."""
FOUNDERS = "-"
"""The proposal of generation 0, which every founder knows without the store."""


class Generation(NamedTuple):
    """The live ranks, and from which step on they exchange with each other."""

    number: int
    members: Mapping[int, int]
    """By rank, in ascending order: the incarnation of its process, 0 for the first."""
    start: int = 0
    """The first training step that they exchange in; members of gossip train alone until then."""
    lost: tuple[Loss, ...] = ()
    """All ranks that are missing, in the order in which they were lost."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in ascending order."""
        return tuple(self.members)

    def without(self, losses: Sequence[Loss], start: int) -> Generation:
        """The next generation, in which these ranks are no members."""
        gone = {loss.rank for loss in losses}
        members = {rank: incarnation for rank, incarnation in self.members.items() if rank not in gone}
        return Generation(self.number + 1, members, start, (*self.lost, *losses))

    def including(self, rank: int, incarnation: int) -> Generation:
        """The next generation, in which a new process has the place of `rank`."""
        members = dict(sorted({**self.members, rank: incarnation}.items()))
        lost = tuple(loss for loss in self.lost if loss.rank != rank)
        return Generation(self.number + 1, members, self.start, lost)

    def changes_since(self, before: Generation) -> list[str]:
        """Return a sentence for each rank that was lost or replaced since the generation `before`."""
        lost = [str(loss) for loss in self.lost if loss not in before.lost]
        replaced = [rank for rank, process in self.members.items() if before.members.get(rank) != process]
        return [*lost, *(f"a new process has the place of rank {rank}" for rank in replaced)]

    def to_json(self) -> str:
        """All fields, for the store."""
        return json.dumps([self.number, list(self.members.items()), self.start, self.lost])

    @classmethod
    def from_json(cls, text: bytes) -> Generation:
        """Raise `ValueError` or the like for anything but the result of `to_json`."""
        found, pairs, start, lost = parse_list(text, 4)
        members = {parse_int(rank): parse_int(incarnation) for rank, incarnation in pairs}
        return cls(parse_int(found), members, parse_int(start), tuple(_loss(*loss) for loss in lost))


def _loss(rank: object, step: object, why: object, finished: object, by: object) -> Loss:
    require(isinstance(why, str) and isinstance(finished, bool))
    return Loss(parse_int(rank), parse_int(step), str(why), bool(finished), None if by is None else parse_int(by))


class Head(NamedTuple):
    """What the store says is current."""

    proposal: str
    """Under which key the details of the generation stand."""
    collective: int
    """The number of the latest collective that a rank came to; 0 before the first."""
    phase: str
    """Of that collective; while it is `OPEN` a new process may become a member."""

    def has_begun(self, collective: int) -> bool:
        """True once all members have come to `collective`."""
        return self.collective > collective or (self.collective == collective and self.phase != GATHERING)

    def to_json(self) -> str:
        """All fields, for the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: bytes) -> Head:
        """Raise `ValueError` for anything but a head."""
        proposal, collective, phase = parse_list(text, 3)
        require(isinstance(proposal, str) and phase in (OPEN, GATHERING, RUNNING))
        return cls(proposal, parse_int(collective), phase)


class Generations:
    """The generations of one world, as the process of one rank reads and changes them. On any thread."""

    def __init__(self, store: TimedStore, founders: Generation) -> None:
        self._store = store
        self._known = {FOUNDERS: founders}  # by proposal; a thread may still hold an older head than another has read
        store.compare_set(HEAD, "", Head(FOUNDERS, 0, OPEN).to_json())

    def current(self) -> tuple[Head, Generation]:
        """The head and its generation; costs one store operation, and one more after a change."""
        head = parse(HEAD, self._store.get(HEAD), Head.from_json)
        if head.proposal not in self._known:
            key = f"generation/{head.proposal}"
            self._known[head.proposal] = parse(key, self._store.get(key), Generation.from_json)
        return head, self._known[head.proposal]

    def propose(self, head: Head, generation: Generation) -> bool:
        """Make `generation` the current one if `head` still stands; True if it does now."""
        proposal = f"{generation.number}/{token_hex(8)}"
        self._store.set(f"generation/{proposal}", generation.to_json())
        return self._change(head, head._replace(proposal=proposal))

    def set_phase(self, head: Head, collective: int, phase: str) -> bool:
        """Say how far `collective` has come, if `head` still stands; True if it does."""
        return self._change(head, head._replace(collective=collective, phase=phase))

    def _change(self, before: Head, after: Head) -> bool:
        stands = self._store.compare_set(HEAD, before.to_json(), after.to_json())
        return bool(stands == after.to_json().encode())
