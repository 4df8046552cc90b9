# SPDX-License-Identifier: Apache-2.0
"""Symbolic values of a replay: who is in a cell, as bit masks (sums) or exact weights (mixes).

A cell is a (rank, chunk) pair, numbered ``rank * chunks + chunk``. Both kinds of state offer the same three
verbs: built from what is defined, `apply` a step, `first_wrong` against a goal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from commrt.collective import ANYTHING, Collective, Kind
from commrt.schedule import ADD, COPY, IntArray, Step

__all__ = ["Cells", "Masks", "Refute", "Weights", "select"]

Refute = Callable[[str, int], None]
"""Called with what is wrong and the cell; does not return."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A step spelled out cell by cell, restricted to a block of chunks."""

    src: IntArray
    dst: IntArray
    combine: IntArray
    weight: NDArray[np.float64]

    def where(self, keep: NDArray[np.generic]) -> Cells:
        """The selected cells."""
        return Cells(self.src[keep], self.dst[keep], self.combine[keep], self.weight[keep])


def select(step: Step, lo: int, hi: int) -> Cells:
    """The cells that `step` moves within chunks [lo, hi), in order of (src, lo)."""
    first, last = np.clip(step.lo, lo, hi), np.clip(step.hi, lo, hi)
    length = last - first
    ordered = np.lexsort((first, step.src))
    ordered = ordered[length[ordered] > 0]
    length = length[ordered]
    row = np.repeat(ordered, length)
    begins = np.repeat(np.cumsum(length) - length, length)
    chunk = first[row] - lo + np.arange(len(row)) - begins
    return Cells(
        step.src[row] * (hi - lo) + chunk, step.dst[row] * (hi - lo) + chunk, step.combine[row], step.weight[row]
    )


def _waves(dst: IntArray) -> list[IntArray]:
    """Indices grouped so that no group names a cell twice, earlier ones first."""
    order = np.argsort(dst, kind="stable")
    fresh = np.concatenate(([True], dst[order][1:] != dst[order][:-1])) if len(dst) else np.zeros(0, dtype=bool)
    position = np.arange(len(dst))
    nth = position - np.maximum.accumulate(np.where(fresh, position, 0))
    return [np.sort(order[nth == k]) for k in range(int(nth.max(initial=-1)) + 1)]


class Masks:
    """Contribution sets as bit masks of 64-bit words [cells, words]; an empty set is an undefined cell."""

    def __init__(self, defined: NDArray[np.bool_]) -> None:
        ranks, chunks = defined.shape
        self._ranks = ranks
        self._held = np.zeros((ranks * chunks, -(-ranks // 64)), dtype=np.uint64)
        rank = np.repeat(np.arange(ranks), chunks)[defined.reshape(-1)]
        self._held[np.flatnonzero(defined), rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)

    def apply(self, cells: Cells, refute: Refute) -> None:
        """Move all `cells` at once; refutes undefined sources and contributions counted twice."""
        incoming = self._held[cells.src]
        unknown = ~incoming.any(axis=1)
        if unknown.any():
            refute("sends this chunk before it holds a value", int(cells.src[unknown][0]))
        copies = cells.combine == COPY
        self._held[cells.dst[copies]] = incoming[copies]
        adds = np.flatnonzero(~copies)
        for wave in _waves(cells.dst[adds]):
            self._add(cells.dst[adds[wave]], incoming[adds[wave]], refute)

    def _add(self, dst: IntArray, incoming: NDArray[np.uint64], refute: Refute) -> None:
        own = self._held[dst]
        if (blank := ~own.any(axis=1)).any():
            refute("adds to this chunk before it holds a value", int(dst[blank][0]))
        if (twice := (own & incoming).any(axis=1)).any():
            ranks = self._members((own & incoming)[twice][0])
            refute(f"receives the contribution of ranks {ranks} a second time", int(dst[twice][0]))
        self._held[dst] = own | incoming

    def first_wrong(self, goal: IntArray, collective: Collective) -> tuple[int, str] | None:
        """The first cell that is not the sum over its goal's ranks, and what it is instead."""
        wanted = np.zeros((len(collective.families), self._held.shape[1]), dtype=np.uint64)
        for row, family in enumerate(collective.families):
            for rank in family:
                wanted[row, rank // 64] |= np.uint64(1) << np.uint64(rank % 64)
        wrong = np.flatnonzero((self._held != wanted[goal]).any(axis=1) & (goal != ANYTHING))
        return (int(wrong[0]), f"the sum over ranks {self._members(self._held[wrong[0]])}") if len(wrong) else None

    def _members(self, words: NDArray[np.uint64]) -> str:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return "{" + ", ".join(map(str, np.flatnonzero(bits)[: self._ranks].tolist())) + "}"


class Weights:
    """Exact shares of the origin ranks, per cell {origin: share}; most are absent after a few steps of gossip."""

    def __init__(self, defined: NDArray[np.bool_]) -> None:
        ranks, chunks = defined.shape
        self._ranks, self._chunks = ranks, chunks
        self._defined = defined.reshape(-1).copy()
        self._rows = [{cell // chunks: Fraction(1)} for cell in range(ranks * chunks)]

    def apply(self, cells: Cells, refute: Refute) -> None:
        """Move all `cells` at once; refutes undefined sources and targets."""
        blank = ~self._defined[cells.src]
        if blank.any():
            refute("sends this chunk before it holds a value", int(cells.src[blank][0]))
        blank = ~self._defined[cells.dst] & (cells.combine != COPY)
        if blank.any():
            refute("combines into this chunk before it holds a value", int(cells.dst[blank][0]))
        incoming = [self._rows[cell] for cell in cells.src.tolist()]
        columns = (cells.dst.tolist(), incoming, cells.combine.tolist(), cells.weight.tolist())
        for dst, row, combine, weight in zip(*columns, strict=True):  # new rows, as others may read the old ones
            self._rows[dst] = row if combine == COPY else _combined(self._rows[dst], row, combine, weight)
        self._defined[cells.dst] = True

    def first_wrong(self, goal: IntArray, collective: Collective) -> tuple[int, str] | None:
        """The first cell whose weights are not what the collective's kind asks for, and what they are."""
        if collective.kind is Kind.DOUBLY_STOCHASTIC:
            return self._first_not_stochastic(collective.total)
        wanted = [_even(family, collective.kind) for family in collective.families]
        for cell, family in enumerate(goal.tolist()):
            if family != ANYTHING and _without_zeros(self._rows[cell]) != wanted[family]:
                return cell, self._row(cell)
        return None

    def _first_not_stochastic(self, total: int) -> tuple[int, str] | None:
        held = [[Fraction(0)] * self._ranks for _ in range(self._chunks)]
        for cell, row in enumerate(self._rows):
            if sum(row.values()) != total or min(row.values()) < 0:
                return cell, self._row(cell)
            for origin, share in row.items():
                held[cell % self._chunks][origin] += share
        for chunk, origin in product(range(self._chunks), range(self._ranks)):
            if held[chunk][origin] != total:
                what = f"{held[chunk][origin]} of this rank's value over all ranks together"
                return origin * self._chunks + chunk, what
        return None

    def _row(self, cell: int) -> str:
        row = self._rows[cell]
        return "weights {" + ", ".join(f"{i}: {row[i]}" for i in sorted(row) if row[i]) + "}"


Row = dict[int, Fraction]


def _combined(own: Row, incoming: Row, combine: int, weight: float) -> Row:
    keep, take = (Fraction(1), Fraction(1)) if combine == ADD else (1 - Fraction(weight), Fraction(weight))
    row = {origin: keep * share for origin, share in own.items()}
    for origin, share in incoming.items():
        row[origin] = row.get(origin, Fraction(0)) + take * share
    return row


def _even(family: tuple[int, ...], kind: Kind) -> Row:
    share = Fraction(1, len(family)) if kind is Kind.AVERAGE else Fraction(1)
    return dict.fromkeys(family, share)


def _without_zeros(row: Row) -> Row:
    return {origin: share for origin, share in row.items() if share}
