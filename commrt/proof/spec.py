# SPDX-License-Identifier: Apache-2.0
"""What a collective must do: who holds which chunk before, and whose contributions each has after.

A `Collective` holds both as arrays over (rank, chunk). `verify` replays a schedule and checks it
against one. Pure functions, which raise `ScheduleError` for what would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from commrt.algorithm import Algorithm
from commrt.errors import ScheduleError, UsageError
from commrt.schedule import IntArray, Schedule, require_counts

MAX_RANKS = 1 << 17
MAX_DIFFERENT = 1 << 28
"""Most (rank, chunk) pairs of a collective that does not promise the same to all ranks."""
ANYTHING = -1
"""Goal of a (rank, chunk) whose final value nobody relies on."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """Precondition and goal of each (rank, chunk)."""

    name: str
    defined: NDArray[np.bool_]
    """[ranks, chunks] holds a value of its own before the first step."""
    goal: IntArray
    """[ranks, chunks] index into `families`, or ANYTHING."""
    families: tuple[tuple[int, ...], ...]
    """Sets of ranks.

    A cell must end with each contribution of one of them exactly once, and no other.
    """
    total: int | None = None
    """If given, contributions are mixed by doubly stochastic weights instead, whose sum it is.

    The weights are not negative; they sum to it over origins for each rank, and over ranks for each
    origin. Whoever runs the schedule divides by it.
    """


def all_reduce(ranks: int, chunks: int, members: Sequence[int] | None = None) -> Collective:
    """Return the collective that sums over the members at each; other ranks are not checked."""
    if members is None:
        return _everywhere("all_reduce", ranks, chunks)
    _require_fitting(ranks, chunks)
    if not isinstance(members, Sequence):
        raise UsageError(f"members={members!r:.80}: give a list of ranks, or leave it out")
    _require_ranks(members, ranks)
    goal = np.full((ranks, chunks), ANYTHING, dtype=np.int64)
    goal[list(members)] = 0
    return _all_defined("all_reduce", goal, tuple(members))


def doubly_stochastic(ranks: int, chunks: int, total: int = 1) -> Collective:
    """Return mixing that keeps the mean: rows and columns of its weights sum to `total`."""
    return _everywhere("doubly_stochastic", ranks, chunks, total)


def promise(algorithm: Algorithm, schedule: Schedule) -> Collective:
    """Return what a step's `schedule` must do: an all-reduce, or keep the mean if it mixes."""
    row = getattr(algorithm, "mixing_row", None)
    shape = schedule.ranks, schedule.chunks
    return all_reduce(*shape) if row is None else doubly_stochastic(*shape, row)


def reduce(ranks: int, chunks: int, root: int = 0) -> Collective:
    """Return the collective that sums over all ranks at the root; other ranks are not checked."""
    return _all_defined("reduce", _goals(ranks, chunks, root), _all(ranks))


def reduce_scatter(ranks: int, chunks: int) -> Collective:
    """Return the collective that sums chunk c at its owner, rank ``c * ranks // chunks``."""
    return _all_defined("reduce_scatter", _goals(ranks, chunks, _owner(ranks, chunks)), _all(ranks))


def all_gather(ranks: int, chunks: int) -> Collective:
    """Return the collective that copies chunk c from rank ``c * ranks // chunks`` to all ranks."""
    owner = _owner(ranks, chunks)
    return _copied("all_gather", owner, np.broadcast_to(owner, (ranks, chunks)))


def gather(ranks: int, chunks: int, root: int = 0) -> Collective:
    """Return the collective that copies chunk c from rank ``c * ranks // chunks`` to the root."""
    owner = _owner(ranks, chunks)
    return _copied("gather", owner, _goals(ranks, chunks, root, owner))


def scatter(ranks: int, chunks: int, root: int = 0) -> Collective:
    """Return the collective that copies chunk c from the root to rank ``c * ranks // chunks``."""
    _require_fitting(ranks, chunks)
    _require_ranks([root], ranks)
    return _copied("scatter", root, _goals(ranks, chunks, _owner(ranks, chunks), root))


def all_to_all(ranks: int, chunks: int) -> Collective:
    """Return the collective that copies piece ``s * ranks + d``, of ``ranks**2``, from s to d."""
    source, target = np.divmod(_owner(ranks, chunks, pieces=ranks), ranks)
    return _copied("all_to_all", source, _goals(ranks, chunks, target, source))


def broadcast(ranks: int, chunks: int, root: int = 0) -> Collective:
    """Return the collective after which every rank holds the root's buffer."""
    _require_fitting(ranks, 1)
    require_counts("broadcast", chunks=chunks)
    _require_ranks([root], ranks)
    return _all_defined("broadcast", np.broadcast_to(np.int64(0), (ranks, chunks)), (root,))


def collective_of(name: str, ranks: int, chunks: int, root: int = 0) -> Collective:
    """Return the collective called `name`; a barrier gathers a token of every rank at all ranks.

    >>> collective_of("scatter", ranks=2, chunks=2, root=1).goal
    array([[ 1, -1],
           [-1,  1]])
    """
    rooted = {"broadcast": broadcast, "reduce": reduce, "gather": gather, "scatter": scatter}
    others = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_to_all": all_to_all}
    others |= {"all_reduce": all_reduce, "barrier": all_gather}
    if not isinstance(name, str):
        raise UsageError(f"a collective's name is a string, not {name!r:.80}")
    if name in rooted:
        return rooted[name](ranks, chunks, root)
    if name in others:
        return replace(others[name](ranks, chunks), name=name)
    offered = ", ".join(sorted([*rooted, *others]))
    raise UsageError(f"no collective is called {name!r}: choose one of {offered}")


def _everywhere(name: str, ranks: int, chunks: int, total: int | None = None) -> Collective:
    """Return a collective of all ranks; its goal takes no memory, so a too large one is refused."""
    require_counts(name, ranks=ranks, chunks=chunks)
    return _all_defined(name, np.broadcast_to(np.int64(0), (ranks, chunks)), _all(ranks), total)


def _all_defined(
    name: str, goal: IntArray, family: tuple[int, ...], total: int | None = None
) -> Collective:
    return Collective(name, np.broadcast_to(np.True_, goal.shape), goal, (family,), total)


def _goals(ranks: int, chunks: int, at: int | IntArray, family: int | IntArray = 0) -> IntArray:
    """Return goals [ranks, chunks]: `family` at rank `at`, both [chunks], and nothing elsewhere."""
    _require_fitting(ranks, chunks)
    _require_ranks(np.unique(at).tolist(), ranks)
    goal = np.full((ranks, chunks), ANYTHING, dtype=np.int64)
    goal[at, np.arange(chunks)] = family
    return goal


def _copied(name: str, source: int | IntArray, goal: IntArray) -> Collective:
    """Return a collective whose chunks only `source` [chunks] has at first; families are ranks."""
    ranks, chunks = goal.shape
    defined = _goals(ranks, chunks, source) != ANYTHING
    return Collective(name, defined, goal, tuple((rank,) for rank in _all(ranks)))


def _require_fitting(ranks: int, chunks: int) -> None:
    require_counts("a collective", ranks=ranks, chunks=chunks)
    if ranks * chunks > MAX_DIFFERENT:
        raise ScheduleError(
            f"a collective of {ranks:,} ranks and {chunks:,} chunks is too large for a proof: give"
            f" at most {MAX_DIFFERENT:,} ranks x chunks"
        )


def _require_ranks(members: Sequence[int], ranks: int) -> None:
    unknown = [rank for rank in members if type(rank) is not int or not 0 <= rank < ranks]
    if unknown or len(set(members)) != len(members) or not len(members):
        raise ScheduleError(
            f"members {list(members)} must be different ranks out of 0..{ranks - 1}, at least one"
        )


def _all(ranks: int) -> tuple[int, ...]:
    if not 1 <= ranks <= MAX_RANKS:
        raise ScheduleError(
            f"a collective of {ranks:,} ranks is too large for a proof: give 1 to {MAX_RANKS:,}"
            " ranks"
        )
    return tuple(range(ranks))


def _owner(ranks: int, chunks: int, pieces: int = 1) -> IntArray:
    """Return which rank owns each chunk, or which of its `pieces`, counted over all ranks."""
    _require_fitting(ranks, chunks)
    return np.arange(chunks, dtype=np.int64) * ranks * pieces // chunks
