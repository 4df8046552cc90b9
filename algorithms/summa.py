# SPDX-License-Identifier: Apache-2.0
"""2.5-D tensor parallelism: the broadcasts of a distributed matrix product on a grid of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commrt.algorithms import tree
from commrt.algorithms.ring import Ring
from commrt.schedule import IntArray, Schedule, beside, empty

__all__ = ["Grid", "forward", "sum_over_depths"]


@dataclass(frozen=True)
class Grid:
    """Layers of side x side ranks. Rank = column + side * (row + side * layer)."""

    side: int
    depth: int = 1

    @property
    def world(self) -> int:
        """Ranks of the grid."""
        return self.side * self.side * self.depth

    @property
    def rows(self) -> IntArray:
        """One group of `side` ranks for each row of each layer."""
        return np.arange(self.world).reshape(-1, self.side)

    @property
    def columns(self) -> IntArray:
        """One group of `side` ranks for each column of each layer."""
        return self._cube.swapaxes(1, 2).reshape(-1, self.side)

    @property
    def depths(self) -> IntArray:
        """One group of `depth` ranks for each place in a layer."""
        return self._cube.reshape(self.depth, -1).T

    @property
    def _cube(self) -> IntArray:
        return np.arange(self.world).reshape(self.depth, self.side, self.side)


def forward(grid: Grid, x: int = 1, w: int = 1) -> Schedule:
    """Give each rank the blocks of X in its row, `x` chunks each, and of W in its column, `w` chunks each.

    Chunks t * x to (t + 1) * x hold X(row, t). Chunks of W(t, column) follow those of all blocks of X.
    """
    q, chunks = grid.side, grid.side * (x + w)
    whole = empty(grid.world, chunks)
    for t in range(q):
        move, start = tree.broadcast(q, t), q * x + t * w
        across = move.over(grid.rows, grid.world).within(t * x, (t + 1) * x, chunks)
        down = move.over(grid.columns, grid.world).within(start, start + w, chunks)
        whole = whole.then(beside([across, down]))
    return whole.named("summa forward")


def sum_over_depths(grid: Grid) -> Schedule:
    """Sum the gradients of W over the layers: a ring all-reduce in every group of `grid.depths` at once."""
    if grid.depth == 1:
        return empty(grid.world)
    return Ring().schedule(0, grid.depth).over(grid.depths, grid.world).named("summa sum over depths")
