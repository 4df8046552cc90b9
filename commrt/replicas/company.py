# SPDX-License-Identifier: Apache-2.0
"""Where each rank does steps of its own: how all come together nevertheless, and how a rank comes and goes.

Who gathers waits for all that train to be members, and who takes the place of a rank that is gone comes only while
all others are in steps, neither in a call of all nor between two. Each says what it does before it looks at what the
others say, so one of the two sees the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from commrt.errors import CommrtError, DeadlineExceeded, Place, UsageError
from commrt.runtime.world import World
from commrt.store.charter import Charter
from commrt.store.presence import TRAINING, Doing, Presence
from commrt.threads.patience import Patience

__all__ = ["Company"]

_log = logging.getLogger("commrt")

LOOK_S = 0.05
COMPANY = TRAINING | {Doing.GATHERS}
"""Those with whom a rank trains."""


class Company:
    """Of one rank; for the thread that trains."""

    def __init__(self, world: World, presence: Presence, needed: int) -> None:
        self._world, self._presence, self._needed = world, presence, needed
        self._is_new = False  # it took a place while the others were in their steps, and has begun none

    @property
    def others(self) -> tuple[int, ...]:
        """All other ranks, in the order in which this one asks them."""
        ranks = range(self._world.size)
        return (*ranks[self._world.rank + 1 :], *ranks[: self._world.rank])

    def are_gathered(self) -> bool:
        """True while others do something together; from any thread."""
        return Doing.GATHERS in self._presence.of(self.others).values()

    def gather(self) -> None:
        """Before all ranks do something together: wait for those that were left behind, and live."""
        patience = Patience(self._world.timeout_s)
        self._presence.say(Doing.GATHERS)
        while (outside := self._outside()) and patience.left_s > 0:
            Event().wait(LOOK_S)
        if outside:
            _log.warning("commrt: rank %d goes on without ranks %s, which live", self._world.rank, outside)

    def await_the_others(self) -> None:
        """Who is new comes with them: they may be in their last steps, or have done it before, and then never come.

        Until then this rank is one that trains: who lacks its gradient waits for it.
        """
        if not self._is_new:
            return
        patience = Patience(self._world.timeout_s)
        self._presence.say(Doing.AWAITS)
        while Doing.TRAINS in self._presence.of(self.others).values():
            if patience.left_s <= 0:
                raise DeadlineExceeded(
                    f"this process took the place of rank {self._world.rank}, and calls for all before its first step, "
                    f"while the others train: they have not come within {self._world.timeout_s:g} s. What all do "
                    "together between attach() and the first step has been done; leave it out where world.is_successor",
                    Place(self._world.rank),
                )
            Event().wait(LOOK_S)

    def _outside(self) -> list[int]:
        """Those who train and are no members."""
        self.be_in()
        outside = set(self.others) - set(self._world.members)
        outside.difference_update(self._world.survival.membership.gone(outside))
        return [rank for rank, doing in self._presence.of(outside).items() if doing in COMPANY]

    def be_in(self) -> None:
        """Be a member, if this rank is none, or the others connect anew."""
        self._world.lane.submit(lambda: self._world.survival.be_in(0)).result()

    def disperse(self) -> None:
        """After it."""
        with suppress(CommrtError, RuntimeError):  # who gathers knows already
            self._presence.say(Doing.BETWEEN)
            self._world.survival.calls.release()

    def train(self) -> None:
        """At the begin of a step."""
        self._is_new = False
        if self._presence.doing in {Doing.BETWEEN, Doing.AWAITS, Doing.GATHERS}:
            self._world.survival.calls.go_on()
            self._presence.say(Doing.TRAINS)

    def await_welcome(self, takes_a_step: Callable[[], bool]) -> None:
        """Until this rank is let in, in place of a rank that is gone; raises `DeadlineExceeded`.

        `takes_a_step` takes the state of one that has begun a step, and says if it has: then all calls that belong to
        earlier steps have been made, and for the next one all wait for this rank.
        """
        patience = Patience(self._world.timeout_s)
        while not (self._is_welcome() and takes_a_step()):
            self._presence.say(Doing.COMES)
            if patience.left_s <= 0:
                what = f"the others have not come out of what all do together within {self._world.timeout_s:g} s"
                raise DeadlineExceeded(what, Place(self._world.rank))
            Event().wait(LOOK_S)
        self._is_new = True
        self._world.survival.calls.follow()  # whoever gathers from now on waits for this rank

    def _is_welcome(self) -> bool:
        """True if all who live are in steps of their own; from then on they wait for this rank before they gather."""
        self._presence.say(Doing.TRAINS)
        doing = set(self._presence.of(self.others).values())
        if not doing & COMPANY:
            raise UsageError(
                f"this process takes the place of rank {self._world.rank}, but the others have finished, or are gone"
            )
        return not doing & {Doing.GATHERS, Doing.BETWEEN}

    def end(self) -> None:
        """Let those who are late have this rank's state before it is gone."""
        self._presence.say(Doing.ENDS)
        if self._presence.outlast(lambda doing: doing not in TRAINING):
            Charter.withdraw(self._world.store)

    def leave(self) -> None:
        """Let those who have questions left ask them, if this process holds the store."""
        if self._world.lane.failure is not None:  # it counts as gone
            return
        with suppress(CommrtError, RuntimeError):
            if self._world.holds_store:
                self._presence.outlast(lambda doing: doing in {Doing.LEFT, None}, self._needed)
            else:
                self._presence.say(Doing.LEFT)
