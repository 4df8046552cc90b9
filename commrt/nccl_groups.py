# SPDX-License-Identifier: Apache-2.0
"""In which NCCL groups a hop is sent: in none that is so large that NCCL cuts it.

Pure functions of a step of all ranks, so both ends of a message find the same group.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from math import inf

import numpy as np

from commrt.schedule import IntArray, Step

MOST_MESSAGES = 7
"""Of a rank in a hop that NCCL never cuts: a kernel takes 254 batches, of which 32 stay free, a
message up to 32.
"""
JOINED = ((1 << 16, 18), (1 << 19, 3), (inf, 1))
"""(bytes, groups): how many groups become one for messages of up to so many bytes, of 1, 8 and 32
batches each.
"""


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
    sent, received = (_positions(ends, distance) for ends in (step.src, step.dst))
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


def _positions(ends: IntArray, distance: IntArray) -> IntArray:
    """Return the position of each transfer among those of the same end, by distance."""
    order = np.lexsort((distance, ends))
    position = np.empty_like(order)
    position[order] = np.arange(len(order)) - np.searchsorted(ends[order], ends[order])
    return position


def joined(group: int, nbytes: float) -> tuple[int, int]:
    """Return which group carries a message of `nbytes`: its row of `JOINED`, and its number there.

    `group` is the one of `nccl_groups`, for large messages. Smaller ones take less of a kernel, so
    several groups become one.
    """
    row, factor = next((row, factor) for row, (most, factor) in enumerate(JOINED) if nbytes <= most)
    return row, group // factor


def group_count(groups: IntArray | None, nbytes: float) -> int:
    """Return in how many groups a step is sent whose transfers are in `groups`, if each message has
    `nbytes`.
    """
    return 1 if groups is None else joined(int(groups.max()), nbytes)[1] + 1
