# SPDX-License-Identifier: Apache-2.0
"""Symbolic values of a replay: contributions as bit masks (sums) or exact weights (mixes).

A cell is a (rank, chunk) pair, numbered ``rank * chunks + chunk``. Both kinds of state are built
from the cells that hold a value at first; `apply` plays a step or raises `Refuted`, `check`
compares with a collective's goal. A state belongs to one replay, and only `apply` changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from commrt.proof.spec import ANYTHING, Collective
from commrt.schedule import ADD, COPY, IntArray, Step

UNDEFINED = "sends this chunk before it holds a value"


class Refuted(Exception):
    """Raised for a step, or a final state, that no correct schedule has. Never leaves this room."""

    def __init__(self, what: str, cell: int) -> None:
        self.what = what
        self.cell = cell


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The transfers of a step cell by cell, restricted to a block of chunks."""

    src: IntArray
    dst: IntArray
    combine: IntArray
    weight: NDArray[np.float64]
    row: IntArray
    """The transfer of the step that moves the cell."""


def select(step: Step, lo: int, hi: int) -> Cells:
    """Return the cells that `step` moves within chunks [lo, hi), in order of (src, lo)."""
    first, last = (np.minimum(np.maximum(column, lo), hi) for column in (step.lo, step.hi))
    length = last - first
    ordered = np.lexsort((first, step.src))
    ordered = ordered[length[ordered] > 0]
    length = length[ordered]
    row = np.repeat(ordered, length)
    begins = np.repeat(np.cumsum(length) - length, length)
    chunk = first[row] - lo + np.arange(len(row)) - begins
    src, dst = (ranks[row] * (hi - lo) + chunk for ranks in (step.src, step.dst))
    return Cells(src, dst, step.combine[row], step.weight[row], row)


def different(numbers: IntArray) -> IntArray:
    """Return the different `numbers` in order.

    `np.unique` hashes: 7 s for two million in steps of 7, not 0.3 s.
    """
    ordered = np.sort(numbers)
    return ordered[_is_new(ordered)]


def _is_new(ordered: IntArray) -> NDArray[np.bool_]:
    """Return True for each number of a sorted row that differs from the one before it."""
    found = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=found[1:])
    return found


def _waves(dst: IntArray) -> list[IntArray]:
    """Return groups of indices, earlier ones first, such that no group names a cell twice."""
    order = np.argsort(dst, kind="stable")
    position = np.arange(len(dst))
    is_first = _is_new(dst[order])
    if is_first.all():
        return [position] if len(dst) else []
    nth = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return [np.sort(order[nth == k]) for k in range(int(nth.max(initial=-1)) + 1)]


class Masks:
    """Sets of contributions as 64-bit masks [cells, words]; empty for an undefined cell."""

    def __init__(self, defined: NDArray[np.bool_]) -> None:
        ranks, chunks = defined.shape
        self.chunks = chunks
        self._held = np.zeros((ranks * chunks, -(-ranks // 64)), dtype=np.uint64)
        rank = np.repeat(np.arange(ranks), chunks)[defined.reshape(-1)]
        self._held[np.flatnonzero(defined), rank // 64] = np.uint64(1) << (rank % 64).astype(
            np.uint64
        )

    @property
    def by_rank(self) -> NDArray[np.uint64]:
        """[ranks, chunks, words] what each rank holds."""
        return self._held.reshape(-1, self.chunks, self._held.shape[1])

    def apply(self, cells: Cells) -> None:
        """Move all `cells` at once; refute undefined sources and contributions counted twice."""
        incoming = self._held[cells.src]
        if (blank := ~incoming.any(axis=1)).any():
            raise Refuted(UNDEFINED, int(cells.src[blank][0]))
        copies = cells.combine == int(COPY)
        self._held[cells.dst[copies]] = incoming[copies]
        adds = np.flatnonzero(~copies)
        for wave in _waves(cells.dst[adds]):
            self._add(cells.dst[adds[wave]], incoming[adds[wave]])

    def _add(self, dst: IntArray, incoming: NDArray[np.uint64]) -> None:
        own = self._held[dst]
        if (blank := ~own.any(axis=1)).any():
            raise Refuted("adds to this chunk before it holds a value", int(dst[blank][0]))
        if (twice := (own & incoming).any(axis=1)).any():
            ranks = _members((own & incoming)[twice][0])
            raise Refuted(
                f"receives the contribution of ranks {ranks} a second time", int(dst[twice][0])
            )
        self._held[dst] = own | incoming

    def check(self, goal: IntArray, collective: Collective) -> None:
        """Refute the first cell that is not the sum over its goal's ranks."""
        wanted = np.zeros((len(collective.families), self._held.shape[1]), dtype=np.uint64)
        for row, family in enumerate(collective.families):
            for rank in family:
                wanted[row, rank // 64] |= np.uint64(1) << np.uint64(rank % 64)
        wrong = np.flatnonzero((self._held != wanted[goal]).any(axis=1) & (goal != ANYTHING))
        if len(wrong):
            raise _wrong_end(
                int(wrong[0]),
                f"the sum over ranks {_members(self._held[wrong[0]])}",
                goal,
                collective,
            )


def _members(words: NDArray[np.uint64]) -> str:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return "{" + ", ".join(map(str, np.flatnonzero(bits).tolist())) + "}"


Row = dict[int, Fraction]
"""Shares by origin rank; most ranks are absent after a few steps of gossip."""


class Weights:
    """Exact shares of the origin ranks, a `Row` per cell."""

    def __init__(self, defined: NDArray[np.bool_]) -> None:
        ranks, chunks = defined.shape
        self.chunks = chunks
        self._defined = defined.reshape(-1).copy()
        self._rows: list[Row] = [{cell // chunks: Fraction(1)} for cell in range(ranks * chunks)]

    @property
    def by_rank(self) -> NDArray[np.float64]:
        """[ranks, chunks, origins] the shares that each rank holds."""
        shares = np.zeros((len(self._rows), len(self._rows) // self.chunks))
        for cell, row in enumerate(self._rows):
            shares[cell, [*row]] = [*map(float, row.values())]
        return shares.reshape(-1, self.chunks, shares.shape[1])

    def apply(self, cells: Cells) -> None:
        """Move all `cells` at once; refute undefined sources and targets."""
        if (blank := ~self._defined[cells.src]).any():
            raise Refuted(UNDEFINED, int(cells.src[blank][0]))
        if (blank := ~self._defined[cells.dst] & (cells.combine != int(COPY))).any():
            raise Refuted(
                "combines into this chunk before it holds a value", int(cells.dst[blank][0])
            )
        incoming = [self._rows[cell] for cell in cells.src.tolist()]
        columns = (cells.dst.tolist(), incoming, cells.combine.tolist(), cells.weight.tolist())
        # new rows, as others may read the old ones
        for dst, row, combine, weight in zip(*columns, strict=True):
            self._rows[dst] = (
                row if combine == COPY else _combined(self._rows[dst], row, combine, weight)
            )
        self._defined[cells.dst] = True

    def check(self, goal: IntArray, collective: Collective) -> None:
        """Refute the first cell whose weights are not what the collective asks for."""
        if collective.total is not None:
            self._check_stochastic(goal, collective)
            return
        wanted = [dict.fromkeys(family, Fraction(1)) for family in collective.families]
        for cell, family in enumerate(goal.tolist()):
            held = {origin: share for origin, share in self._rows[cell].items() if share}
            if family != ANYTHING and held != wanted[family]:
                raise _wrong_end(cell, self._text(cell), goal, collective)

    def _check_stochastic(self, goal: IntArray, collective: Collective) -> None:
        held = [Fraction(0)] * len(self._rows)  # by origin and chunk, over all ranks
        for cell, row in enumerate(self._rows):
            if sum(row.values()) != collective.total or min(row.values()) < 0:
                raise _wrong_end(cell, self._text(cell), goal, collective)
            for origin, share in row.items():
                held[origin * self.chunks + cell % self.chunks] += share
        for cell, share in enumerate(held):
            if share != collective.total:
                what = f"{share} of this rank's value over all ranks together"
                raise _wrong_end(cell, what, goal, collective)

    def _text(self, cell: int) -> str:
        row = self._rows[cell]
        return "weights {" + ", ".join(f"{i}: {row[i]}" for i in sorted(row) if row[i]) + "}"


def _combined(own: Row, incoming: Row, combine: int, weight: float) -> Row:
    keep, take = (
        (Fraction(1), Fraction(1)) if combine == ADD else (1 - Fraction(weight), Fraction(weight))
    )
    row = {origin: keep * share for origin, share in own.items()}
    for origin, share in incoming.items():
        row[origin] = row.get(origin, Fraction(0)) + take * share
    return row


def _wrong_end(cell: int, held: str, goal: IntArray, collective: Collective) -> Refuted:
    wanted = "doubly stochastic"
    if collective.total is None:
        family = collective.families[goal[cell]]
        listed = ", ".join(map(str, family[:12])) + (", ..." if len(family) > 12 else "")
        wanted = f"the sum over ranks {{{listed}}}"
    return Refuted(f"ends with {held}; expected: {wanted}", cell)
