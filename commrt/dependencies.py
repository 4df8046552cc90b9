# SPDX-License-Identifier: Apache-2.0
"""What the hops of a rank wait for: for its own earlier hops, where combining overlaps exchanges,
and for peers, where ranks read each other's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commrt.program import Hop
from commrt.schedule import COPY


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
    >>> from commrt.program import program
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
    >>> from commrt.program import program
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
    >>> from commrt.program import program
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
