# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a schedule: what it sends and receives in each hop.

A *step* of a schedule is seen from one rank as a *hop*; the runtime says hop where it means a place in a
schedule, and step where it means a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commrt.flaws import require_sound
from commrt.schedule import COPY, Combine, Schedule, Step

__all__ = ["Hop", "Leg", "Program", "Waits", "among", "program", "spans", "waits_of"]

PLAYED_KEPT = 64
"""Programs of places in schedules that are remembered."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One end of a transfer: chunks [lo, hi) to or from `peer`."""

    peer: int
    lo: int
    hi: int
    combine: Combine = COPY
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Hop:
    """What one rank does in one step of a schedule, sorted by (peer, lo) on both ends."""

    sends: tuple[Leg, ...]
    recvs: tuple[Leg, ...]

    @property
    def idle(self) -> bool:
        """True if this rank exchanges nothing."""
        return not (self.sends or self.recvs)

    @property
    def combined(self) -> tuple[Leg, ...]:
        """What is received to be combined with the own."""
        return tuple(leg for leg in self.recvs if leg.combine != COPY)


@dataclass(frozen=True, slots=True)
class Program:
    """All hops of one rank, in order; hops in which it is idle are kept, and empty."""

    rank: int
    ranks: int
    chunks: int
    hops: tuple[Hop, ...]

    @property
    def peers(self) -> frozenset[int]:
        """Everybody this rank exchanges with."""
        return frozenset(leg.peer for hop in self.hops for leg in hop.sends + hop.recvs)


def program(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`; O(transfers of the whole schedule). Raises `ScheduleError` for what none can do.

    >>> from commrt.schedule import ADD
    >>> swap = Schedule("swap", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, ADD)]))
    >>> program(swap, 0).hops[0].sends
    (Leg(peer=1, lo=0, hi=1, combine=<Combine.ADD: 1>, weight=0.0),)
    """
    hops = tuple(_hop(require_sound(step, schedule).canonical(), rank) for step in schedule.played())
    return Program(rank, schedule.ranks, schedule.chunks, hops)


def among(schedule: Schedule, members: Sequence[int], rank: int, ranks: int) -> Program:
    """The program of `rank` where ``members[i]``, of a world of `ranks`, plays rank i of `schedule`.

    The same as of ``schedule.over(members, ranks)``. From the second time on, with whatever members, it costs
    O(transfers of this one rank): in a quorum it is another one's place from step to step.

    >>> from commrt.algorithms.ring import all_reduce
    >>> ring = all_reduce(3)
    >>> among(ring, (1, 4, 6), 4, 8) == program(ring.over((1, 4, 6), world=8), 4)
    True
    """
    hops = tuple(_renamed(hop, members) for hop in _played(schedule, list(members).index(rank)).hops)
    return Program(rank, ranks, schedule.chunks, hops)


_played = lru_cache(PLAYED_KEPT)(program)


def _renamed(hop: Hop, members: Sequence[int]) -> Hop:
    def renamed(legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
        those = (Leg(members[leg.peer], leg.lo, leg.hi, leg.combine, leg.weight) for leg in legs)
        return tuple(sorted(those, key=lambda leg: (leg.peer, leg.lo)))

    return Hop(renamed(hop.sends), renamed(hop.recvs))


@dataclass(frozen=True, slots=True)
class Waits:
    """What must be combined before which hop, where combining goes on beside the exchanges that follow."""

    after: tuple[int | None, ...]
    """[hops] the latest earlier hop that combines what this one sends or receives; None if none does."""
    parity: tuple[int, ...]
    """[hops] 0 or 1 in turn, of those that combine: two that follow each other receive in different places."""
    overlap: bool
    """False if what one hop combines is always needed by the next."""


def waits_of(hops: Sequence[Hop], chunks: int) -> Waits:
    """The dependencies between `hops`; O(chunks carried).

    >>> from commrt.algorithms.ring import all_reduce
    >>> waits_of(program(all_reduce(3), 0).hops, 3).after
    (None, 0, 1, 0)
    >>> waits_of(program(all_reduce(3).in_slices(2), 0).hops, 6).after
    (None, None, 0, 1, 2, 3, 0, 1)
    """
    latest, combining = np.full(chunks, -1), [-1, -1]
    after, parity, overlap, before = [], [], False, -1
    for number, hop in enumerate(hops):
        touched = [int(latest[leg.lo : leg.hi].max(initial=-1)) for leg in hop.sends + hop.recvs]
        room = combining[-2] if hop.combined else -1  # where the last but one received is used again
        conflict = max([room, *touched])
        overlap = overlap or (conflict < before == combining[-1] and not hop.idle)
        after.append(None if conflict < 0 else conflict)
        parity.append(len(combining) % 2)
        before = before if hop.idle else number
        if hop.combined:
            combining.append(number)
        for leg in hop.combined:
            latest[leg.lo : leg.hi] = number
    return Waits(tuple(after), tuple(parity), overlap)


def spans(numel: int, chunks: int, granule: int = 1) -> list[int]:
    """Bounds [chunks + 1] that cut `numel` elements in even chunks, each starting at a multiple of `granule`.

    Where there are fewer granules than chunks, the last chunks are empty and start at `numel`.

    >>> spans(10, 4)
    [0, 3, 6, 8, 10]
    >>> spans(100, 3, granule=16)
    [0, 48, 80, 100]
    """
    grains = -(-numel // granule)
    size, longer = divmod(grains, chunks)
    starts = [(i * size + min(i, longer)) * granule for i in range(chunks)]
    return [min(start, numel) for start in starts] + [numel]


def _hop(step: Step, rank: int) -> Hop:
    sends = tuple(_legs(step.rows(step.src == rank), "dst"))
    recvs = tuple(_legs(step.rows(step.dst == rank), "src"))
    return Hop(sends, recvs)


def _legs(step: Step, peer: str) -> Iterator[Leg]:
    peers = getattr(step, peer)
    order = np.lexsort((step.lo, peers))
    columns = (peers, step.lo, step.hi, step.combine, step.weight)
    for who, lo, hi, combine, weight in zip(*(column[order].tolist() for column in columns), strict=True):
        yield Leg(who, lo, hi, Combine(combine), weight)
