# SPDX-License-Identifier: Apache-2.0
"""What the log of members says, and what follows from it; the same for everybody who reads the same.

Its lines, for generation g::

    missed g rank peer why             rank broke its connections, because of `peer`, and will come to g
    here g rank step bell              rank has come to g, before its step `step`; where to ring to see whether it lives
    left g rank why bell in_order      rank comes to nothing until it is here again: it closed its world, failed,
                                       was found gone, or stands aside for the rest of what it missed

Where those who come need not wait for a rank that is alive, one that was left behind, or that takes the place of a dead
one, is a member again once it is here. The bell says which process of a rank is meant, and begins with its birth: how
many had that place before. What is said of an older process says nothing of a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from commrt.store.hearsay import listed, number, require, where

__all__ = ["GRACE_S", "HERE", "LEFT", "MISSED", "Attendance", "Loss", "Need", "Verdict", "birth", "lines_of"]

GRACE_S = 10.0
"""How long one that is missed may be silent: two that miss a third do not notice it at the same instant."""
MISSED, HERE, LEFT = "missed", "here", "left"


def birth(bell: str | None) -> int:
    """Of the process that answers there: how many had its place before; 0 where none could come after it."""
    return 0 if bell is None else int(bell.split()[0])


class Need(NamedTuple):
    """For those who need not wait for a rank that is alive."""

    members: int
    """So many must come, or the deadline passes."""
    patience_s: float
    """How long one that promised nothing may be silent."""
    summon: Callable[[int, int], bool]
    """(rank, generation) -> it promised to come; from any thread."""
    are_gathered: Callable[[], bool]
    """True while others do something together."""


class Loss(NamedTuple):
    """A rank that takes no part any more."""

    rank: int
    step: int
    """From which the others go on without it."""
    why: str
    in_order: bool = False
    """It finished, and closed its world."""

    def __str__(self) -> str:
        return f"rank {self.rank} is lost from step {self.step} on: {self.why}"


class Verdict(NamedTuple):
    """How it goes on."""

    members: tuple[int, ...]
    step: int
    """From which they exchange again: the latest to which one of them had come."""
    lost: tuple[Loss, ...]
    bells: tuple[tuple[int, str], ...] = ()
    """Of the members' processes, by rank, where they have one."""

    @classmethod
    def read(cls, said: bytes) -> Verdict:
        """From JSON; raises `ValueError` or the like for anything else."""
        members, step, lost, bells = listed(said, 4)
        known = tuple((number(rank), where(bell.encode())) for rank, bell in bells)
        return cls(tuple(map(number, members)), number(step), tuple(_loss(*loss) for loss in lost), known)


def _loss(rank: object, step: object, why: object, in_order: object = False) -> Loss:
    return Loss(number(rank), number(step), str(why), bool(in_order))


def lines_of(said: bytes) -> list[list[Any]]:
    """What the log says, line by line; raises `ValueError` or the like for what no rank would say."""
    return [_checked(listed(line)) for line in said.splitlines()]


def _checked(line: list[Any]) -> list[Any]:
    kind, generation, rank, *rest = line
    number(generation)
    number(rank)
    if kind == MISSED:
        peer, why = rest
        require(isinstance(why, str) and (peer is None or number(peer) >= 0))
        return line
    require(kind in (HERE, LEFT) and 1 <= len(rest) <= 3)
    require(isinstance(rest[0], str) if kind == LEFT else number(rest[0]) >= 0)
    if len(rest) > 1 and rest[1] is not None:
        require(rest[1] == "0" or where(rest[1].encode()))
    return line


class Leave(NamedTuple):
    """How a rank has left."""

    why: str
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Attendance:
    """Of one generation, as far as the log goes."""

    here: Mapping[int, int]
    """The step to which each had come, in the order in which they came."""
    coming: frozenset[int]
    missed: Mapping[int, str]
    """Why."""
    left: Mapping[int, Leave]
    bells: Mapping[int, str | None]
    """Of those who have ever come."""

    @classmethod
    def of(cls, lines: Iterable[Sequence[Any]], generation: int, *, may_return: bool = False) -> Attendance:
        """What the log says of `generation`; who has left may come to it if ranks `may_return`."""
        here, left, bells = dict[int, int](), dict[int, Leave](), dict[int, str | None]()
        said = [(kind, g == generation, *rest) for kind, g, *rest in lines]
        for kind, is_now, rank, *rest in said:
            if kind == LEFT:
                why, bell, in_order = (*rest, None, False)[:3]
                if bell is None or birth(bell) >= birth(bells.get(rank)):  # else another had taken its place before
                    left[rank] = Leave(why, bool(in_order))
            elif kind == HERE:
                step, bells[rank] = (*rest, None)[:2]
                if may_return:
                    left.pop(rank, None)  # it is back, or another took its place
                if is_now:
                    here[rank] = step
        missed = [rest for kind, is_now, *rest in said if kind == MISSED and is_now]
        coming = frozenset(rank for rank, *_ in missed)
        return cls(here, coming, {peer: why for _, peer, why in missed}, left, bells)

    @property
    def stay(self) -> tuple[int, ...]:
        """Those who have come, and have not left."""
        return tuple(sorted(rank for rank in self.here if rank not in self.left))

    def absent(self, members: Sequence[int]) -> list[int]:
        """Those who may still come."""
        return [rank for rank in members if rank not in self.here and rank not in self.left]

    def is_short(self, members: Sequence[int], needed: int, promised: Collection[int], *, is_early: bool) -> bool:
        """True if too few are here, and will come of `members`: who said so, and who is silent while it `is_early`."""
        absent = self.absent(members)
        return len(self.stay) + sum(is_early or rank in self.coming or rank in promised for rank in absent) < needed

    def verdict(
        self,
        members: Sequence[int],
        waited_s: float,
        timeout_s: float,
        need: Need | None = None,
        promised: Collection[int] = (),
        outside: Collection[int] = (),
    ) -> Verdict | None:
        """What follows after waiting so long; None if it is too early to say. Who is `outside` lives, and may come."""
        stay = self.stay
        if not stay or waited_s < self._wait_s(members, timeout_s, need, {*promised}, outside):
            return None
        step = max(self.here[rank] for rank in stay)
        late = f"did not come within {timeout_s if need is None else need.patience_s:g} s"
        known = {rank: leave for rank, leave in self.left.items() if leave.in_order or rank in members}
        leaves = {rank: Leave(self.missed.get(rank, late)) for rank in members} | known
        lost = tuple(Loss(rank, step, *leave) for rank, leave in leaves.items() if rank not in stay)
        return Verdict(stay, step, lost, tuple((rank, bell) for rank in stay if (bell := self.bells.get(rank))))

    def _wait_s(
        self,
        members: Sequence[int],
        timeout_s: float,
        need: Need | None,
        promised: set[int],
        outside: Collection[int],
    ) -> float:
        """How long those who are here wait."""
        absent = self.absent(members)
        if need is None:
            awaited = [rank for rank in absent if rank in self.coming or rank not in self.missed]
            silent_s = GRACE_S
        else:
            are_few = len(self.stay) < need.members  # who finished gives no gradient to those who go on
            awaited = [rank for rank in absent if rank in self.coming | promised or are_few]
            awaited += outside if are_few else ()
            silent_s = need.patience_s
        return timeout_s if awaited else min(silent_s, timeout_s) if absent else 0.0
