# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a schedule: what it sends and receives in each hop, and where chunks are cut.

A *hop* is one step of a schedule as one rank sees it. The runtime says hop for a place in a
schedule, and step for a training step. All here are values and pure functions, for any thread;
caches keep the latest programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from commrt.nccl_groups import nccl_groups
from commrt.schedule import COPY, Combine, IntArray, Schedule, Step, require_valid

PROGRAMS_KEPT = 64
"""Programs that `member_program` keeps; `permuted_program` keeps the steps of as many schedules."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a transfer: chunks [lo, hi) to or from `peer`."""

    peer: int
    lo: int
    hi: int
    combine: Combine = COPY
    weight: float = 0.0
    group: int | None = field(default=None, repr=False)
    """Which of the hop's NCCL groups carries it, see `nccl_groups`; None if there is only one."""


@dataclass(frozen=True, slots=True)
class Hop:
    """What one rank does in one step of a schedule, sorted by (peer, lo) on both ends."""

    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]

    @property
    def idle(self) -> bool:
        """True if the rank exchanges nothing in this hop."""
        return not (self.sends or self.recvs)

    @property
    def combined(self) -> tuple[Transfer, ...]:
        """The receives whose data is added to, or mixed into, the rank's own."""
        return tuple(each for each in self.recvs if each.combine != COPY)


@dataclass(frozen=True, slots=True)
class Program:
    """All hops of one rank, in order. A hop in which the rank is idle is kept, empty."""

    rank: int
    ranks: int
    chunks: int
    hops: tuple[Hop, ...]

    @property
    def peers(self) -> frozenset[int]:
        """All ranks that this rank exchanges with."""
        return frozenset(each.peer for hop in self.hops for each in hop.sends + hop.recvs)


def program(schedule: Schedule, rank: int) -> Program:
    """Return the program of `rank`, in O(transfers of the whole schedule).

    Raises `ScheduleError` for invalid transfers.

    >>> from commrt.schedule import ADD
    >>> swap = Schedule("swap", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, ADD)]))
    >>> program(swap, 0).hops[0].sends
    (Transfer(peer=1, lo=0, hi=1, combine=<Combine.ADD: 1>, weight=0.0),)
    """
    hops = []
    for step in schedule.checked_steps():
        canonical = require_valid(step, schedule).canonical()
        groups = nccl_groups(canonical, schedule.ranks)
        sent = canonical.src == rank
        received = canonical.dst == rank
        sends = _transfers(canonical, canonical.dst, sent, groups)
        hops.append(Hop(sends, _transfers(canonical, canonical.src, received, groups)))
    return Program(rank, schedule.ranks, schedule.chunks, tuple(hops))


def _transfers(
    step: Step, peers: IntArray, rows: NDArray[np.bool_], groups: IntArray | None
) -> tuple[Transfer, ...]:
    """Return `rows` of `step`, of which `peers` are the other ends, sorted by (peer, lo)."""
    columns = [each[rows].tolist() for each in (peers, step.lo, step.hi, step.combine, step.weight)]
    columns += [] if groups is None else [groups[rows].tolist()]
    found = sorted(zip(*columns, strict=True), key=_PEER_AND_LO)
    return tuple(
        [
            Transfer(peer, lo, hi, _COMBINES[combine], *rest)
            for peer, lo, hi, combine, *rest in found
        ]
    )


_PEER_AND_LO = itemgetter(0, 1)
_COMBINES = [*Combine]


def member_program(schedule: Schedule, members: Sequence[int], rank: int, ranks: int) -> Program:
    """Return the program of `rank` where ``members[i]``, of `ranks`, runs rank i of `schedule`.

    The result equals that of ``schedule.over(members, ranks)``, but for NCCL groups. Repeated
    calls, with any members, cost only O(transfers of this rank): a quorum gives a rank another
    place in a schedule from step to step.

    >>> from commrt.algorithms.ring import all_reduce
    >>> ring = all_reduce(3)
    >>> member_program(ring, (1, 4, 6), 4, 8) == program(ring.over((1, 4, 6), world=8), 4)
    True
    """

    def renamed(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        found = (replace(each, peer=members[each.peer]) for each in transfers)
        return tuple(sorted(found, key=lambda each: (each.peer, each.lo)))

    kept = _program_kept(schedule, members.index(rank))
    hops = tuple(Hop(renamed(hop.sends), renamed(hop.recvs)) for hop in kept.hops)
    return Program(rank, ranks, schedule.chunks, hops)


_program_kept = lru_cache(PROGRAMS_KEPT)(program)


def permuted_program(schedule: Schedule, members: IntArray, rank: int, ranks: int) -> Program:
    """Return what `member_program` does, without NCCL groups, for `members` that often change.

    It keeps all ranks' part of the schedule, which should be short.
    """
    hops = []
    place = int(np.flatnonzero(members == rank)[0])
    for step in _steps_kept(schedule):
        sends = _transfers(step, members[step.dst], step.src == place, None)
        hops.append(Hop(sends, _transfers(step, members[step.src], step.dst == place, None)))
    return Program(rank, ranks, schedule.chunks, tuple(hops))


@lru_cache(PROGRAMS_KEPT)
def _steps_kept(schedule: Schedule) -> list[Step]:
    return [require_valid(step, schedule).canonical() for step in schedule.checked_steps()]


def chunk_bounds(numel: int, chunks: int, granule: int = 1) -> list[int]:
    """Return bounds [chunks + 1] that cut `numel` elements evenly, at multiples of `granule`.

    With fewer granules than chunks, the last chunks are empty and start at `numel`.

    >>> chunk_bounds(10, 4)
    [0, 3, 6, 8, 10]
    >>> chunk_bounds(100, 3, granule=16)
    [0, 48, 80, 100]
    """
    size, longer = divmod(-(-numel // granule), chunks)
    starts = [(i * size + min(i, longer)) * granule for i in range(chunks)]
    return [min(start, numel) for start in starts] + [numel]
