# SPDX-License-Identifier: Apache-2.0
"""What a rank with backup workers has still to become before it goes on: what others are, or what it was itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic

from torch import Tensor

from commrt.errors import UsageError
from commrt.model.donor import Donor
from commrt.model.state import Stateful, dump, load
from commrt.replicas.backing import Backing
from commrt.replicas.relief import Due
from commrt.runtime.world import World

__all__ = ["Arrears"]

_log = logging.getLogger("commrt")
BEHIND = (
    "commrt: rank %d was late, and weights were changed outside of a step since, or an optimizer's step is due: it "
    "keeps older ones until all train again; call consolidate() on all ranks before weights are changed for a while"
)


class Arrears:
    """Of `carried`, the states that go with the weights of `backing`."""

    def __init__(self, carried: Sequence[Stateful], donor: Donor, backing: Backing, world: World) -> None:
        self._carried, self._donor, self._backing, self._world = carried, donor, backing, world
        self.due: Due | None = None
        """It was late, and others have the weights that it needs."""
        self.taken: Tensor | None = None
        """The states that came with them, if their rank was in a forward pass; until this one is."""
        self._told: Due | None = None
        self._told_s = self._asked_s = 0.0
        self._kept: Tensor | None = None  # the states as they were before a gradient that nobody used
        self._weights: Tensor | None = None  # these as well

    @property
    def version(self) -> int:
        """That of the weights which this rank must have when it next runs forward."""
        return self._backing.version if self.due is None else self.due.version

    def owe(self, version: int, donors: Sequence[int], turn: int) -> None:
        """Others have the weights of `version`; those that are late together ask different ones first."""
        start = turn % len(donors)
        self.due = Due(version, (*donors[start:], *donors[:start]))

    def remain(self) -> None:
        """Nobody can give it; told once, and raised as `UsageError` if that stays so for half of the deadline."""
        now_s, rank, limit_s = monotonic(), self._world.rank, self._world.timeout_s / 2
        if self._told != self.due:
            _log.warning(BEHIND, rank)
        if self._told != self.due or now_s > self._asked_s + limit_s / 2:  # it was not asked for again and again
            self._told, self._told_s = self.due, now_s
        self._asked_s = now_s
        if now_s - self._told_s > limit_s:
            raise UsageError(BEHIND.removeprefix("commrt: ") % rank)

    def forget(self) -> None:
        """Something else was loaded."""
        self.due = self.taken = self._kept = self._weights = self._told = None

    def keep(self) -> None:
        """Nobody used this rank's gradient: whatever its loop does now is to be undone."""
        if self._kept is None:
            self._kept = dump(self._carried)
        if self._weights is None:
            self._weights = self._donor.weights()

    def restore(self, *, in_pass: bool) -> None:
        """Undo what was done since `keep`; before it is `in_pass` not to weights that a loop has put in for a while."""
        is_intact = in_pass or self._donor.is_intact
        if self._kept is not None:
            states, self._kept = self._kept, None
            load(states, self._carried)
            self._backing.restore_buffers()
        if self._weights is not None and is_intact:
            weights, self._weights = self._weights, None
            self._donor.go_back_to(weights, self._backing.version, in_pass=in_pass)

    def accept(self) -> None:
        """Weights are what they should be."""
        self._weights = None
        self._donor.settle()

    def renew(self) -> None:
        """Since states were taken, the loop may have stepped a scheduler, as the other rank's had already."""
        if self.taken is not None:
            load(self.taken, self._carried)
            self.taken = None
