# SPDX-License-Identifier: Apache-2.0
"""What members write on the store, as values and as text: the head, and that a rank has come.

The head holds the current generation, so a generation is either the current one or not, for
everybody at once. It also says how far the latest collective has come, so that two things follow
from one compare-and-set: all members begin a collective or none does, also if a generation ends at
that instant; and no process takes the place of a lost rank in the middle of a collective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from commrt.runtime.generation import Generation, Loss
from commrt.store.parsing import parse_int, require, typed

OPEN = "open"
GATHERING = "gathering"
RUNNING = "running"
"""Of the latest collective: no rank is in it, ranks wait for the others, all members have come."""


class Head(NamedTuple):
    """What the store says is current."""

    generation: Generation
    collective: int = 0
    """The number of the latest collective that a rank came to; 0 before the first."""
    phase: str = OPEN
    """Of that collective; while it is `OPEN` a new process may become a member."""

    def has_begun(self, collective: int) -> bool:
        """True once all members have come to `collective`."""
        return self.collective > collective or (
            self.collective == collective and self.phase != GATHERING
        )

    def to_json(self) -> str:
        """All fields, for the store."""
        number, members, *others = self.generation
        return json.dumps([self.collective, self.phase, number, [*members.items()], *others])

    @classmethod
    def from_json(cls, text: bytes) -> Head:
        """Raise `ValueError` or the like for anything but the result of `to_json`."""
        collective, phase, *fields = typed(json.loads(text), int, str, int, list, int, list, list)
        require(phase in (OPEN, GATHERING, RUNNING))
        number, pairs, start, lost, silent = fields
        members = dict(typed(pair, int, int) for pair in pairs)
        losses = tuple(Loss(*typed(loss, int, int, str, bool, int | None)) for loss in lost)
        generation = Generation(number, members, start, losses, tuple(map(parse_int, silent)))
        return cls(generation, collective, phase)


class Arrival(NamedTuple):
    """A rank that has come to a roll call or to the collective `what`, and the first step that it
    has not exchanged.
    """

    step: int
    what: str = ""
    unreached: Sequence[int] = ()
    """In a roll call: the members that do not reach this rank. Its latest line counts."""
    made: int | None = None
    """How many steps its loop has made: all ranks that meet must have made as many. None where they
    may differ, with backup workers and in ``join()``.
    """
