# SPDX-License-Identifier: Apache-2.0
"""How large a schedule is, whatever it runs on: steps, transfers, bytes and peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from commrt.schedule import Schedule, Step

__all__ = ["Traffic", "traffic", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The size of a schedule, whatever it runs on."""

    steps: int
    transfers: int
    bytes_per_rank: Fraction
    """Bytes sent by the busiest rank, in units of the buffer."""
    max_peers: int
    """Most peers that any rank exchanges with in one step."""


def traffic(schedule: Schedule) -> Traffic:
    """Count steps, transfers, bytes and peers of `schedule`; one pass, O(transfers)."""
    return traffic_of(schedule.checked_steps(), schedule.ranks, schedule.chunks)


def traffic_of(steps: Iterable[Step], ranks: int, chunks: int) -> Traffic:
    """Count the traffic of `steps`, each of them valid for so many ranks and chunks."""
    sent = np.zeros(ranks, dtype=np.int64)
    count = transfers = peers = 0
    for step in map(Step.canonical, steps):
        count += 1
        transfers += len(step)
        np.add.at(sent, step.src, step.hi - step.lo)
        pairs = np.concatenate((step.src * ranks + step.dst, step.dst * ranks + step.src))
        peers = max(peers, int(np.bincount(np.unique(pairs) // ranks).max(initial=0)))
    return Traffic(count, transfers, Fraction(int(sent.max(initial=0)), chunks), peers)
