# SPDX-License-Identifier: Apache-2.0
"""In which order a schedule adds up the contributions of an element.

Floats do not add up to the same bits in every order. If all elements are added in one order, an
element's sum does not depend on the size of its tensor, on its place there, or on where buckets are
cut.

Two summands may change places: ``a + b`` and ``b + a`` have the same bits. So an order is a tree.
Its leaves are the ranks' contributions, and a node is one call of a kernel, which adds a rank's own
value and what others sent it for one range of chunks, in order of ranks, and rounds once, at its
end. Pure functions of a schedule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from commrt.errors import UsageError
from commrt.proof.symbols import select
from commrt.schedule import COPY, MIX, IntArray, Schedule, Step, require_schedule

SHOWN = 200
"""Characters of an order, after which the rest is left out."""


@dataclass(frozen=True, slots=True)
class Additions:
    """The orders in which a schedule adds, as far as its result has them."""

    orders: tuple[str, ...]
    """At most two different ones, such as ``((0 + 1) + 2)``, by the ranks that contribute."""
    chunks: tuple[int, ...]
    """The first chunk that is added in each."""

    @property
    def is_one(self) -> bool:
        """True if all elements are added in one order."""
        return len(self.orders) <= 1

    def __str__(self) -> str:
        if not self.orders:
            return "adds nothing"
        if self.is_one:
            return f"one order for all elements: {self.orders[0]}"
        pairs = zip(self.chunks, self.orders, strict=True)
        return "several orders: " + ", and ".join(
            f"chunk {chunk} as {order}" for chunk, order in pairs
        )


def order_of_additions(schedule: Schedule) -> Additions:
    """Return the order in which `schedule` adds each element; raises `UsageError` if it mixes.

    It looks at the cells (rank, chunk) that end with the most contributions, of which a correct
    all-reduce has all, and a reduction to one root those of the root. Cost: O(chunks carried), 2 s
    for a ring of 1,024 ranks.

    >>> from commrt.algorithms import halving_doubling, ring
    >>> print(order_of_additions(halving_doubling.all_reduce(4)))
    one order for all elements: ((0 + 1) + (2 + 3))
    >>> print(order_of_additions(ring.all_reduce(3)))
    several orders: chunk 0 as (0 + (1 + 2)), and chunk 1 as (1 + (0 + 2))
    """
    require_schedule(schedule)
    trees = _Trees(schedule.ranks)
    ends, places = np.unique(_replayed(schedule, trees).T, return_index=True)
    # chunk that ends with each tree
    first = dict(zip(ends.tolist(), (places // schedule.ranks).tolist(), strict=True))
    most = max(trees.counts[tree] for tree in first)
    kept = [tree for tree in first if trees.counts[tree] == most > 1][:2]
    return Additions(tuple(map(trees.text, kept)), tuple(first[tree] for tree in kept))


def require_one_order(schedule: Schedule) -> None:
    """Raise `UsageError` unless `schedule` adds all elements in one order."""
    found = order_of_additions(schedule)
    if not found.is_one:
        raise UsageError(
            f"same_bits with {schedule.name}, which adds in {found}: use commrt.Direct(), or"
            " HalvingDoubling() on 2, 4, 8, ... ranks"
        )


def _replayed(schedule: Schedule, trees: _Trees) -> IntArray:
    """Return the tree that each cell ends with, [ranks, chunks]."""
    ranks = schedule.ranks
    chunks = schedule.chunks
    held = np.repeat(np.arange(ranks), chunks)
    # whose ranges the ranks' programs have
    for step in map(Step.canonical, schedule.checked_steps()):
        if (step.combine == int(MIX)).any():
            raise UsageError(
                f"{schedule.name} mixes, so what ranks end with is no sum: give a schedule that"
                " adds"
            )
        cells = select(step, 0, chunks)
        incoming = held[cells.src]
        copies = cells.combine == int(COPY)
        summands = np.stack(
            [cells.dst, step.lo[cells.row], step.hi[cells.row], cells.src // chunks, incoming]
        )
        summands = summands[:, ~copies]
        held[cells.dst[copies]] = incoming[copies]
        ordered = summands[:, np.lexsort(summands[3::-1])].T.tolist()
        # a call of a kernel has all that a cell receives for one range of chunks
        for (cell, *_), call in groupby(ordered, key=lambda one: one[:3]):
            parts = [(sender, tree) for *_, sender, tree in call]
            insort(parts, (cell // chunks, int(held[cell])))
            held[cell] = trees.sum_of([tree for _, tree in parts])
    return held.reshape(ranks, chunks)


class _Trees:
    """The trees of a replay, by number: those below `ranks` are leaves."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parts: list[tuple[int, ...]] = [()] * ranks
        self.counts = [1] * ranks
        """Contributions that each tree adds."""
        self._numbers: dict[tuple[int, ...], int] = {}

    def sum_of(self, summands: Sequence[int]) -> int:
        """Return the tree of a call that adds `summands` in this order."""
        parts = (*sorted(summands[:2]), *summands[2:])
        if parts not in self._numbers:
            self._numbers[parts] = len(self._parts)
            self._parts.append(parts)
            self.counts.append(sum(self.counts[part] for part in parts))
        return self._numbers[parts]

    def text(self, tree: int) -> str:
        """Return `tree` as text, at most `SHOWN` characters of it."""
        pieces: list[str] = []
        pending: list[int | str] = [tree]
        while pending and sum(map(len, pieces)) < SHOWN:
            each = pending.pop()
            if isinstance(each, str) or each < self._ranks:
                pieces.append(str(each))
            else:
                first, *rest = self._parts[each]
                pending.append(")")
                for part in reversed(rest):
                    pending += [part, " + "]
                pending += [first, "("]
        return "".join(pieces) + (" ..." if pending else "")
