# SPDX-License-Identifier: Apache-2.0
"""2.5-D tensor parallelism: all that a distributed matrix product Y = XW sends on a grid of ranks, as one schedule.

van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication Algorithm", 1997; for transformers: Xu, Li,
Gong and You, "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2022. `summa.py` runs such products.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from commrt.algorithms import chain, tree
from commrt.algorithms.ring import Ring
from commrt.errors import UsageError
from commrt.proof.spec import ANYTHING, Collective
from commrt.schedule import IntArray, Schedule, beside, empty

__all__ = ["Grid", "backward", "backward_goal", "forward", "forward_goal"]


@dataclass(frozen=True)
class Grid:
    """Layers of side x side ranks; raises `UsageError` below 1. Rank = column + side * (row + side * layer).

    Rows of X are spread over rows and layers, its columns over columns. W is spread over the ranks of a layer, and
    each layer has a copy.

    >>> grid = Grid(side=2, depth=2)
    >>> grid.rows.tolist(), grid.depths.tolist()
    ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])
    """

    side: int
    depth: int = 1

    def __post_init__(self) -> None:
        if self.side < 1 or self.depth < 1:
            raise UsageError(f"a grid of {self.side} x {self.side} x {self.depth} ranks: give whole numbers from 1 on")

    def __str__(self) -> str:
        return f"[{self.side}, {self.side}, {self.depth}]"

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
        """One group of `depth` ranks for each place in a layer, row by row."""
        return self._cube.reshape(self.depth, -1).T

    @property
    def _cube(self) -> IntArray:
        return np.arange(self.world).reshape(self.depth, self.side, self.side)


def forward(grid: Grid, x: int = 1, w: int = 1, slices: int | None = None) -> Schedule:
    """Give each rank the blocks of X in its row and of W in its column, for Y = XW.

    The buffer has `side` blocks of X, then `side` of W; a block of X is to one of W as `x` to `w`. Rank (row, column)
    begins with block `column` of X and block `row` of W. For t = 0, 1, ..., block t of X and of W travel at once: along
    trees, in few steps; with `slices` along chains, in as many parts, and a root sends its block only once.
    Cost: each rank receives side - 1 blocks of X and as many of W. A program can forget blocks t before it gets t + 1.

    >>> print(forward(Grid(2)))
    summa forward: 4 ranks, 4 chunks
      0  copy  0->1 [0:1)  2->3 [0:1)  0->2 [2:3)  1->3 [2:3)
      1  copy  1->0 [1:2)  3->2 [1:2)  2->0 [3:4)  3->1 [3:4)
    """
    x, w = _in_chunks(grid, x, w, slices)
    side, chunks = grid.side, grid.side * (x + w)
    whole = empty(grid.world, chunks)
    for t in range(side):
        places = _block(0, t, x), _block(side * x, t, w)
        whole = whole.then(_crossing(grid, _broadcast(grid, t, slices), *places, chunks))
    return whole.named("summa forward")


def backward(grid: Grid, x: int = 1, w: int = 1, slices: int | None = None) -> Schedule:
    """Form the gradients dX = dY W' and dW = X' dY, of which rank (row, column) ends with its own blocks.

    The buffer has `side` blocks each of X, W, dX and dW. For t = 0, 1, ..., block t of X and of W travel as in
    `forward`; then parts of dX add up along each row at column t, and parts of dW along each column at row t. At last
    dW adds up over the layers.
    Cost: each rank receives 2 (side - 1) blocks of X and as many of W, and 2 (depth - 1) / depth blocks of dW.
    """
    x, w = _in_chunks(grid, x, w, slices)
    side, chunks = grid.side, 2 * grid.side * (x + w)
    begin, lo = side * (x + w), side * (2 * x + w)  # of dX and of dW
    whole = empty(grid.world, chunks)
    for t in range(side):
        places, sums = (_block(0, t, x), _block(side * x, t, w)), (_block(begin, t, x), _block(lo, t, w))
        whole = whole.then(_crossing(grid, _broadcast(grid, t, slices), *places, chunks))
        whole = whole.then(_crossing(grid, _reduce(grid, t, slices), *sums, chunks))
    over_layers = Ring().schedule(0, grid.depth).within(lo, lo + w, chunks)
    row = np.arange(side * side) // side
    return whole.then(over_layers.over(grid.depths, grid.world, shift=row * w), "summa backward")


def _in_chunks(grid: Grid, x: int, w: int, slices: int | None) -> tuple[int, int]:
    """Return the chunks of a block of X and of W, which slices of a chain and of a ring must divide."""
    if x < 1 or w < 1:
        raise UsageError(f"blocks of {x} and {w} chunks: give sizes from 1 on")
    unit = lcm(_broadcast(grid, 0, slices).chunks, grid.depth)
    return x * unit, w * unit


def _broadcast(grid: Grid, t: int, slices: int | None) -> Schedule:
    return tree.broadcast(grid.side, t) if slices is None else chain.broadcast(grid.side, t, slices)


def _reduce(grid: Grid, t: int, slices: int | None) -> Schedule:
    return tree.reduce(grid.side, t) if slices is None else chain.reduce(grid.side, t, slices)


def _crossing(grid: Grid, move: Schedule, x: range, w: range, chunks: int) -> Schedule:
    """Return `move` in all rows on chunks `x`, and in all columns on chunks `w`, at once."""
    along_rows = move.within(x.start, x.stop, chunks).over(grid.rows, grid.world)
    along_columns = move.within(w.start, w.stop, chunks).over(grid.columns, grid.world)
    return beside([along_rows, along_columns])


def _block(begin: int, t: int, length: int) -> range:
    return range(begin + t * length, begin + (t + 1) * length)


def forward_goal(grid: Grid, chunks: int, x: int = 1, w: int = 1) -> Collective:
    """Return what Y = XW needs: each rank ends with its row's blocks of X and its column's blocks of W.

    >>> from commrt.proof.replay import verify
    >>> schedule = forward(grid := Grid(2, 2), slices=4)
    >>> verify(schedule, forward_goal(grid, schedule.chunks)).ok
    True
    """
    defined, goal = _blocks_sent(grid)
    lengths = np.repeat([x, w], grid.side) * chunks // (grid.side * (x + w))
    return _collective("product", grid, defined, goal, lengths)


def backward_goal(grid: Grid, chunks: int, x: int = 1, w: int = 1) -> Collective:
    """Return what both gradients need: blocks as in `forward_goal`, and each rank's own blocks of dX and dW.

    Its block of dX is the sum over its row. Its block of dW is the sum over its column in all layers.
    """
    sent, goal = _blocks_sent(grid)
    _, row, column = _places(grid)
    sums = np.full((grid.world, 2 * grid.side), ANYTHING, dtype=np.int64)
    rank = np.arange(grid.world)
    sums[rank, column] = grid.world + rank // grid.side
    sums[rank, grid.side + row] = grid.world + len(grid.rows) + column
    defined, goal = np.hstack([sent, np.ones_like(sent)]), np.hstack([goal, sums])
    lengths = np.tile(np.repeat([x, w], grid.side), 2) * chunks // (2 * grid.side * (x + w))
    return _collective("gradients of a product", grid, defined, goal, lengths)


def _blocks_sent(grid: Grid) -> tuple[NDArray[np.bool_], IntArray]:
    """Return which blocks of X and W [ranks, 2 side] a rank holds at first, and whose it holds at last."""
    layer, row, column = _places(grid)
    t = np.arange(grid.side)
    of_x = (layer * grid.side + row)[:, None] * grid.side + t
    of_w = layer[:, None] * grid.side**2 + t * grid.side + column[:, None]
    goal = np.hstack([of_x, of_w])
    return goal == np.arange(grid.world)[:, None], goal


def _places(grid: Grid) -> tuple[IntArray, IntArray, IntArray]:
    """Return layer, row and column of each rank."""
    layer, row, column = np.unravel_index(np.arange(grid.world), (grid.depth, grid.side, grid.side))
    return layer, row, column


def _collective(name: str, grid: Grid, defined: NDArray[np.bool_], goal: IntArray, lengths: IntArray) -> Collective:
    """Spread blocks over `lengths` chunks. Families: each rank, each row, each column of all layers."""
    columns = np.arange(grid.world).reshape(-1, grid.side).T
    families = (*np.arange(grid.world)[:, None].tolist(), *grid.rows.tolist(), *columns.tolist())
    defined, goal = np.repeat(defined, lengths, axis=1), np.repeat(goal, lengths, axis=1)
    return Collective(f"{name} on {grid}", defined, goal, tuple(map(tuple, families)))
