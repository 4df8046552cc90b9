# SPDX-License-Identifier: Apache-2.0
"""What a schedule promises: who holds which chunk before, and whose contributions each chunk has after.

A `Collective` is a pair of pre- and postconditions as arrays over (rank, chunk). `commrt.verify` replays a
schedule and checks it against one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from commrt.errors import ScheduleError
from commrt.schedule import IntArray

__all__ = [
    "ANYTHING",
    "Collective",
    "Kind",
    "all_gather",
    "all_reduce",
    "average",
    "broadcast",
    "doubly_stochastic",
    "reduce",
    "reduce_scatter",
]

MOST_RANKS = 1 << 20
ANYTHING = -1
"""Goal of a (rank, chunk) whose final value nobody relies on."""


class Kind(Enum):
    """How the contributions named by a goal must be weighted."""

    SUM = "sum"
    """Each contribution of the goal exactly once, no other."""
    AVERAGE = "average"
    """Each contribution of the goal with weight 1/count, no other."""
    DOUBLY_STOCHASTIC = "doubly stochastic"
    """Weights are not negative; they sum to the total over origins for each rank, and over ranks for each origin."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """A promise over `ranks` x `chunks` cells."""

    name: str
    kind: Kind
    defined: NDArray[np.bool_]
    """[ranks, chunks] holds a value of its own before the first step."""
    goal: IntArray
    """[ranks, chunks] index into `families`, or ANYTHING."""
    families: tuple[tuple[int, ...], ...]
    """Sets of ranks whose contributions a cell must end with."""
    total: int = 1
    """What doubly stochastic weights sum to; whoever runs the schedule divides by it."""

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, chunks)."""
        ranks, chunks = self.goal.shape
        return ranks, chunks


def all_reduce(ranks: int, chunks: int, members: Sequence[int] | None = None) -> Collective:
    """Every member ends with the sum over the members; ranks outside are not looked at."""
    return _over_members("all_reduce", Kind.SUM, (ranks, chunks), members)


def average(ranks: int, chunks: int, members: Sequence[int] | None = None) -> Collective:
    """Every member ends with the mean over the members, by mixing weights."""
    return _over_members("average", Kind.AVERAGE, (ranks, chunks), members)


def doubly_stochastic(ranks: int, chunks: int, total: int = 1) -> Collective:
    """Mixing that keeps the mean over all ranks, after division by `total`: rows and columns of weights sum to it."""
    return replace(_over_members("doubly_stochastic", Kind.DOUBLY_STOCHASTIC, (ranks, chunks), None), total=total)


def reduce(ranks: int, chunks: int, root: int = 0) -> Collective:
    """The root ends with the sum over all ranks; the others are not looked at."""
    _require_ranks([root], ranks)
    goal = np.full((ranks, chunks), ANYTHING, dtype=np.int64)
    goal[root] = 0
    return Collective("reduce", Kind.SUM, _everywhere((ranks, chunks)), goal, (_all(ranks),))


def reduce_scatter(ranks: int, chunks: int) -> Collective:
    """Chunk c ends summed over all ranks at its owner, rank ``c * ranks // chunks``."""
    goal = np.full((ranks, chunks), ANYTHING, dtype=np.int64)
    goal[_owner(ranks, chunks), np.arange(chunks)] = 0
    return Collective("reduce_scatter", Kind.SUM, _everywhere((ranks, chunks)), goal, (_all(ranks),))


def all_gather(ranks: int, chunks: int) -> Collective:
    """Chunk c starts at its owner, rank ``c * ranks // chunks``, and ends everywhere."""
    owner = _owner(ranks, chunks)
    defined = np.zeros((ranks, chunks), dtype=bool)
    defined[owner, np.arange(chunks)] = True
    goal = np.broadcast_to(owner, (ranks, chunks))
    return Collective("all_gather", Kind.SUM, defined, goal, tuple((rank,) for rank in _all(ranks)))


def broadcast(ranks: int, chunks: int, root: int = 0) -> Collective:
    """Every rank ends with the root's buffer."""
    _require_ranks([root], ranks)
    shape = (ranks, chunks)
    return Collective("broadcast", Kind.SUM, _everywhere(shape), _constant(0, shape), ((root,),))


def _over_members(name: str, kind: Kind, shape: tuple[int, int], members: Sequence[int] | None) -> Collective:
    if members is None:
        return Collective(name, kind, _everywhere(shape), _constant(0, shape), (_all(shape[0]),))
    _require_ranks(members, shape[0])
    goal = np.full(shape, ANYTHING, dtype=np.int64)
    goal[list(members)] = 0
    return Collective(name, kind, _everywhere(shape), goal, (tuple(members),))


def _require_ranks(members: Sequence[int], ranks: int) -> None:
    strangers = sorted({rank for rank in members if not 0 <= rank < ranks})
    if strangers or len(set(members)) != len(members) or not len(members):
        raise ScheduleError(f"members {list(members)} must be different ranks out of 0..{ranks - 1}, at least one")


def _all(ranks: int) -> tuple[int, ...]:
    if not 1 <= ranks <= MOST_RANKS:
        raise ScheduleError(f"a promise over {ranks:,} ranks: give 1 to {MOST_RANKS:,}; more are too large for a proof")
    return tuple(range(ranks))


def _owner(ranks: int, chunks: int) -> IntArray:
    return np.arange(chunks, dtype=np.int64) * ranks // chunks


def _everywhere(shape: tuple[int, int]) -> NDArray[np.bool_]:
    return np.broadcast_to(np.True_, shape)


def _constant(value: int, shape: tuple[int, int]) -> IntArray:
    return np.broadcast_to(np.int64(value), shape)
