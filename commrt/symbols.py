# SPDX-License-Identifier: Apache-2.0
"""Symbolic values of a replay: who is in a cell, as bit masks (sums) or exact weights (mixes).

A cell is a (rank, chunk) pair, numbered ``rank * chunks + chunk``. Both kinds of state offer the same three
verbs: built from what is defined, `apply` a step, `first_wrong` against a goal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

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
    """Exact rows of weights over the origin ranks, as fractions [cells, ranks]."""

    def __init__(self, defined: NDArray[np.bool_]) -> None:
        ranks, chunks = defined.shape
        self._chunks = chunks
        self._defined = defined.reshape(-1).copy()
        self._rows = np.full((ranks * chunks, ranks), Fraction(0), dtype=object)
        self._rows[np.arange(ranks * chunks), np.repeat(np.arange(ranks), chunks)] = Fraction(1)

    def apply(self, cells: Cells, refute: Refute) -> None:
        """Move all `cells` at once; refutes undefined sources and targets."""
        blank = ~self._defined[cells.src]
        if blank.any():
            refute("sends this chunk before it holds a value", int(cells.src[blank][0]))
        blank = ~self._defined[cells.dst] & (cells.combine != COPY)
        if blank.any():
            refute("combines into this chunk before it holds a value", int(cells.dst[blank][0]))
        incoming = self._rows[cells.src]
        for wave in _waves(cells.dst):
            self._combine(cells.where(wave), incoming[wave])
        self._defined[cells.dst] = True

    def _combine(self, cells: Cells, incoming: NDArray[np.object_]) -> None:
        own = self._rows[cells.dst]
        exact = [Fraction(weight) for weight in cells.weight.tolist()]
        share = np.array(exact, dtype=object)[:, None]
        code = cells.combine[:, None]
        moved = np.where(code == ADD, own + incoming, own + share * (incoming - own))
        self._rows[cells.dst] = np.where(code == COPY, incoming, moved)

    def first_wrong(self, goal: IntArray, collective: Collective) -> tuple[int, str] | None:
        """The first cell whose weights are not what the collective's kind asks for, and what they are."""
        if collective.kind is Kind.DOUBLY_STOCHASTIC:
            return self._first_not_stochastic()
        wanted = np.full((len(collective.families), self._rows.shape[1]), Fraction(0), dtype=object)
        for row, family in enumerate(collective.families):
            share = Fraction(1, len(family)) if collective.kind is Kind.AVERAGE else Fraction(1)
            wanted[row, list(family)] = share
        wrong = np.flatnonzero((self._rows != wanted[goal]).any(axis=1) & (goal != ANYTHING))
        return (int(wrong[0]), self._row(wrong[0])) if len(wrong) else None

    def _first_not_stochastic(self) -> tuple[int, str] | None:
        bad_rows = np.flatnonzero((self._rows.sum(axis=1) != 1) | (self._rows < 0).any(axis=1))
        if len(bad_rows):
            return int(bad_rows[0]), self._row(bad_rows[0])
        shares = self._rows.reshape(-1, self._chunks, self._rows.shape[1]).sum(axis=0)
        for chunk, origin in np.argwhere(shares != 1):
            held = f"{shares[chunk, origin]} of this rank's value over all ranks together"
            return int(origin * self._chunks + chunk), held
        return None

    def _row(self, cell: int) -> str:
        row = self._rows[cell]
        return "weights {" + ", ".join(f"{i}: {row[i]}" for i in range(len(row)) if row[i]) + "}"
