# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a schedule: what it sends and receives in each hop.

A *hop* is one step of a schedule as one rank sees it. The runtime says hop for a place in a
schedule, and step for a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from commrt.schedule import COPY, Combine, IntArray, Schedule, Step, require_valid

MOST_MESSAGES = 7
"""Of a rank in a hop that NCCL never cuts: a kernel takes 254 batches, of which 32 stay free, a
message up to 32.
"""
JOINED = ((1 << 16, 18), (1 << 19, 3), (inf, 1))
"""(bytes, groups): how many groups become one for messages of up to so many bytes, of 1, 8 and 32
batches each.
"""
PROGRAMS_KEPT = 64
"""Programs that `member_program` remembers, by schedule and rank of the schedule; schedules of
`permuted_program`.
"""


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
    """Return the program of `rank`; O(transfers of the whole schedule). Raises `ScheduleError` for
    invalid transfers.

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


def nccl_groups(step: Step, ranks: int) -> IntArray | None:
    """Return [transfers] in which of its NCCL groups a canonical step sends each; None if it needs
    only one.

    NCCL cuts a group that is too large into several kernels, each rank on its own. Then a send may
    wait for ever for the kernel of its receive (decision 0034). So all ranks send such a hop in the
    same groups, one after the other.

    No rank has more than `MOST_MESSAGES` in a group. Where all ranks send over the same distances,
    it has as many pairs of a send and a receive, which NCCL takes as one.
    """
    if np.bincount(np.concatenate((step.src, step.dst)), minlength=1).max() <= MOST_MESSAGES:
        return None
    distance = (step.dst - step.src) % ranks
    sent, received = (_places(ends, distance) for ends in (step.src, step.dst))
    if np.array_equal(sent, received):
        return sent // MOST_MESSAGES if sent.max() >= MOST_MESSAGES else None
    found = []
    used = Counter[tuple[int, int]]()
    for one, other in zip(step.src.tolist(), step.dst.tolist(), strict=True):
        group = next(
            each for each in count() if max(used[one, each], used[other, each]) < MOST_MESSAGES
        )
        used.update([(one, group), (other, group)])
        found.append(group)
    return np.array(found)


def _places(ends: IntArray, distance: IntArray) -> IntArray:
    """Return the place of each transfer among those of the same end, by distance."""
    order = np.lexsort((distance, ends))
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(ends[order], ends[order])
    return place


def joined(group: int, nbytes: float) -> tuple[int, int]:
    """Return the place of the group that carries a message of `nbytes`, given its group if all were
    large.

    Smaller messages take less of a kernel, so several groups become one.
    """
    size, factor = next(
        (size, factor) for size, (most, factor) in enumerate(JOINED) if nbytes <= most
    )
    return size, group // factor


def group_count(groups: IntArray | None, nbytes: float) -> int:
    """Return in how many groups a step is sent whose transfers are in `groups`, if each message has
    `nbytes`.
    """
    return 1 if groups is None else joined(int(groups.max()), nbytes)[1] + 1


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
    """Return the program of `rank` where ``members[i]``, of a world of `ranks`, runs rank i of
    `schedule`.

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
    """Return what `member_program` does; keeps all transfers of a short schedule, as `members`
    often change places.
    """
    hops = []
    place = int(np.flatnonzero(members == rank)[0])
    for step in _steps_kept(schedule):
        ends = (step.dst, step.src == place), (step.src, step.dst == place)
        hops.append(Hop(*(_transfers(step, members[other], own, None) for other, own in ends)))
    return Program(rank, ranks, schedule.chunks, tuple(hops))


@lru_cache(PROGRAMS_KEPT)
def _steps_kept(schedule: Schedule) -> list[Step]:
    return [require_valid(step, schedule).canonical() for step in schedule.checked_steps()]


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Which hop must be combined before which other hop may run, if combining overlaps later
    exchanges.
    """

    after: tuple[int | None, ...]
    """[hops] the latest earlier hop that combines what this one sends or receives; None if none
    does.
    """
    parity: tuple[int, ...]
    """[hops] 0 or 1 alternately for hops that combine: consecutive ones receive into different
    scratch buffers.
    """
    overlap: bool
    """False if every hop needs what the hop before it combines."""


def dependencies(hops: Sequence[Hop], chunks: int) -> Dependencies:
    """Return the dependencies between `hops`; O(chunks carried).

    >>> from commrt.algorithms.ring import all_reduce
    >>> dependencies(program(all_reduce(3), 0).hops, 3).after
    (None, 0, 1, 0)
    >>> from commrt.algorithms.sliced import in_slices
    >>> dependencies(program(in_slices(all_reduce(3), 2), 0).hops, 6).after
    (None, None, 0, 1, 2, 3, 0, 1)
    """
    latest = np.full(chunks, -1)
    combining = [-1, -1]
    after = []
    parity = []
    overlap = False
    before = -1
    for number, hop in enumerate(hops):
        touched = [int(latest[each.lo : each.hi].max(initial=-1)) for each in hop.sends + hop.recvs]
        # the hop that last received into this scratch buffer
        reused = combining[-2] if hop.combined else -1
        conflict = max([reused, *touched])
        overlap = overlap or (conflict < before == combining[-1] and not hop.idle)
        after.append(None if conflict < 0 else conflict)
        parity.append(len(combining) % 2)
        before = before if hop.idle else number
        if hop.combined:
            combining.append(number)
        for each in hop.combined:
            latest[each.lo : each.hi] = number
    return Dependencies(tuple(after), tuple(parity), overlap)


def final_receives(hops: Sequence[Hop], chunks: int) -> list[list[bool]]:
    """Return for each receive of each hop if it copies chunks that this rank neither sends nor
    receives afterwards.

    >>> from commrt.algorithms.ring import all_reduce
    >>> final_receives(program(all_reduce(3), 0).hops, 3)
    [[False], [False], [False], [True]]
    """
    used = np.zeros(chunks, dtype=bool)
    found = []
    for hop in reversed(hops):
        found.append(
            [each.combine == COPY and not used[each.lo : each.hi].any() for each in hop.recvs]
        )
        for each in hop.sends + hop.recvs:
            used[each.lo : each.hi] = True
    return found[::-1]


class SignalWait(NamedTuple):
    """Where a rank signals to peers how far it has come, and waits until they are far enough.

    Positions grow along a program. At 2h + 1 all work before hop h is done, and what is sent in hop
    h is ready; at 2h + 2 what is received in hop h has been read.
    """

    position: int
    """What this rank signals to all its peers, before it waits."""
    needs: Mapping[int, int]
    """By peer, the least position that it must have signalled."""


@dataclass(frozen=True, slots=True)
class SignalWaits:
    """All of a program whose ranks read what is sent where it lies."""

    before: tuple[SignalWait | None, ...]
    """[hops] before the hop reads anything; None for an idle one."""
    within: tuple[SignalWait | None, ...]
    """[hops] between reading and writing, in a hop that overwrites what it sends; otherwise None.
    """
    end: SignalWait
    """After all hops: then no peer reads this rank's buffer any more."""


def signal_waits(hops: Sequence[Hop], chunks: int, local_peers: Collection[int]) -> SignalWaits:
    """Return when a rank must wait if it and `local_peers` read each other's buffers; O(hops *
    peers * chunks).

    A peer must have written what is read, and must have read what is overwritten. A rank
    signals before it waits, and waits for nothing that a peer signals only after a later hop, so
    all ranks reach the end.

    >>> from commrt.algorithms.direct import all_reduce
    >>> plan = signal_waits(program(all_reduce(2), 0).hops, 2, {1})
    >>> plan.before
    (SignalWait(position=1, needs={1: 1}), SignalWait(position=3, needs={1: 3}))
    >>> plan.end
    SignalWait(position=5, needs={1: 4})
    """
    # the position at which it has read a chunk
    read = {peer: np.zeros(chunks, dtype=np.int64) for peer in local_peers}
    known = dict.fromkeys(local_peers, 0)
    before = []
    within = []

    def signal_wait(position: int, needs: Mapping[int, int]) -> SignalWait:
        new = {peer: need for peer, need in needs.items() if need > known[peer]}
        known.update(new)
        return SignalWait(position, new)

    for number, hop in enumerate(hops):
        ready = 2 * number + 1
        done = 2 * number + 2
        sends, recvs = (
            [each for each in side if each.peer in local_peers] for side in (hop.sends, hop.recvs)
        )
        needs = {
            peer: max((int(row[t.lo : t.hi].max()) for t in hop.recvs), default=0)
            for peer, row in read.items()
        }
        needs |= {each.peer: ready for each in recvs}
        before.append(None if hop.idle else signal_wait(ready, needs))
        clashing = {
            s.peer: done
            for s in sends
            if any(s.lo < each.hi and each.lo < s.hi for each in hop.recvs)
        }
        within.append(signal_wait(done, clashing) if clashing else None)
        for sent in sends:
            read[sent.peer][sent.lo : sent.hi] = done
    return SignalWaits(
        tuple(before),
        tuple(within),
        signal_wait(
            2 * len(hops) + 1, {peer: int(row.max(initial=0)) for peer, row in read.items()}
        ),
    )


def chunk_bounds(numel: int, chunks: int, granule: int = 1) -> list[int]:
    """Return the bounds [chunks + 1] that cut `numel` elements evenly, each at a multiple of
    `granule`.

    With fewer granules than chunks, the last chunks are empty and start at `numel`.

    >>> chunk_bounds(10, 4)
    [0, 3, 6, 8, 10]
    >>> chunk_bounds(100, 3, granule=16)
    [0, 48, 80, 100]
    """
    size, longer = divmod(-(-numel // granule), chunks)
    starts = [(i * size + min(i, longer)) * granule for i in range(chunks)]
    return [min(start, numel) for start in starts] + [numel]
