# SPDX-License-Identifier: Apache-2.0
"""Which hops of a rank touch the same chunks: what waits for combining, and what stays at the end.

Pure functions of a rank's own hops (its parts of a schedule's steps), for binding a program. What
hops wait for in peers is in `commrt.signal_waits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commrt.program import Hop
from commrt.schedule import COPY

NONE = -1
"""In place of a hop's number: no hop. It is less than all."""


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
    latest = np.full(chunks, NONE)  # by chunk: the latest hop that has combined it
    combining = [NONE, NONE]  # the hops that combine, after two that stand for none
    before = NONE  # the hop before this one, but for idle ones
    after = []
    parity = []
    overlap = False
    for number, hop in enumerate(hops):
        touched = [
            int(latest[each.lo : each.hi].max(initial=NONE)) for each in hop.sends + hop.recvs
        ]
        # the hop that last received into this scratch buffer
        reused = combining[-2] if hop.combined else NONE
        conflict = max([reused, *touched])
        after.append(None if conflict == NONE else conflict)
        parity.append(len(combining) % 2)
        if not hop.idle:
            # what the hop before combines may still be combined while this one exchanges
            if before == combining[-1] and conflict < before:
                overlap = True
            before = number
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
