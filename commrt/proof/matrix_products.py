# SPDX-License-Identifier: Apache-2.0
"""What the schedules of a distributed matrix product must do; see `commrt.algorithms.summa`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commrt.algorithms.summa import Grid
from commrt.proof.spec import ANYTHING, Collective, Kind
from commrt.schedule import IntArray

__all__ = ["backward", "forward"]


def forward(grid: Grid, chunks: int, x: int = 1, w: int = 1) -> Collective:
    """Return what Y = XW needs: each rank ends with its row's blocks of X and its column's blocks of W.

    >>> from commrt.algorithms import summa
    >>> from commrt.proof.replay import verify
    >>> schedule = summa.forward(grid := Grid(2, 2), slices=4)
    >>> verify(schedule, forward(grid, schedule.chunks)).ok
    True
    """
    defined, goal = _blocks_sent(grid)
    lengths = np.repeat([x, w], grid.side) * chunks // (grid.side * (x + w))
    return _collective("product", grid, defined, goal, lengths)


def backward(grid: Grid, chunks: int, x: int = 1, w: int = 1) -> Collective:
    """Return what both gradients need: blocks as in `forward`, and each rank ends with its own blocks of dX and dW.

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
    return Collective(f"{name} on {grid}", Kind.SUM, defined, goal, tuple(map(tuple, families)))
