# SPDX-License-Identifier: Apache-2.0
"""Whose gradients or weights a run's steps were made of, from what its ranks noted."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from commrt.cli.charts import MOST_BINS
from commrt.cli.history import Record

__all__ = ["contributors", "last_counted", "met", "shares_of", "width_of"]


def contributors(record: Record) -> dict[int, frozenset[int]]:
    """By step, the ranks that took part in it; steps of which nobody that is left knows are missing."""
    found = dict[int, frozenset[int]]()
    for history in record.histories:
        for share in history.shares:
            if share.members:
                found[share.step] = found.get(share.step, frozenset()) | frozenset(share.members)
    return dict(sorted(found.items()))


def width_of(steps: int) -> int:
    """How many steps share a column."""
    return max(ceil(steps / MOST_BINS), 1)


def shares_of(found: dict[int, frozenset[int]], ranks: int, steps: int) -> list[list[float | None]]:
    """[ranks][columns]: in which share of a column's steps each rank took part; None where none is known.

    >>> shares_of({0: frozenset({0, 1}), 2: frozenset({1})}, ranks=2, steps=3)
    [[1.0, None, 0.0], [1.0, None, 1.0]]
    """
    width = width_of(steps)
    columns: list[list[frozenset[int]]] = [[] for _ in range(ceil(steps / width))]
    for step, members in found.items():
        if step < steps:
            columns[step // width].append(members)
    return [
        [sum(rank in members for members in each) / len(each) if each else None for each in columns]
        for rank in range(ranks)
    ]


def met(record: Record, ranks: int) -> list[list[int]]:
    """[ranks][ranks]: how often the first mixed in what the second sent."""
    counts = [[0] * ranks for _ in range(ranks)]
    for history in record.histories:
        for share in history.shares:
            for peer in share.heard:
                counts[history.rank][peer] += 1
    return counts


def last_counted(found: dict[int, frozenset[int]], rank: int) -> int | None:
    """The last step that `rank` took part in."""
    steps: Sequence[int] = [step for step, members in found.items() if rank in members]
    return max(steps, default=None)
