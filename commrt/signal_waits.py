# SPDX-License-Identifier: Apache-2.0
"""When a rank signals to peers that read its memory, and waits for theirs, before and after hops.

A pure function of a rank's own hops, for any thread; `commrt.runtime.reading` binds its result to
signals.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commrt.program import Hop


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
    """A rank's signals and waits in a program whose ranks read what is sent where it lies."""

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
    # by peer and chunk of this rank: the position at which the peer has read it
    read = {peer: np.zeros(chunks, dtype=np.int64) for peer in local_peers}
    # by peer: the position that this rank has waited for
    known = dict.fromkeys(local_peers, 0)
    before = []
    within = []

    def wait_for(position: int, needs: Mapping[int, int]) -> SignalWait:
        """Return the wait for those of `needs` that are new, and note them in `known`."""
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
            peer: max((int(row[recv.lo : recv.hi].max()) for recv in hop.recvs), default=0)
            for peer, row in read.items()
        }
        needs |= {each.peer: ready for each in recvs}
        before.append(None if hop.idle else wait_for(ready, needs))
        clashing = {
            sent.peer: done
            for sent in sends
            if any(sent.lo < recv.hi and recv.lo < sent.hi for recv in hop.recvs)
        }
        within.append(wait_for(done, clashing) if clashing else None)
        for sent in sends:
            read[sent.peer][sent.lo : sent.hi] = done
    return SignalWaits(
        tuple(before),
        tuple(within),
        wait_for(2 * len(hops) + 1, {peer: int(row.max(initial=0)) for peer, row in read.items()}),
    )
