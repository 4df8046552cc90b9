# SPDX-License-Identifier: Apache-2.0
"""Schedules of 2.5-D tensor parallelism."""

import numpy as np
import pytest

from commrt.algorithms.summa import Grid, forward


@pytest.mark.parametrize("depth", range(1, 5))
@pytest.mark.parametrize("side", range(1, 5))
def test_forward_gives_each_rank_the_blocks_of_its_row_and_column(side: int, depth: int) -> None:
    grid = Grid(side, depth)
    ranks = np.arange(grid.world)
    held = np.full((grid.world, 2 * side), -1)
    held[ranks, ranks % side] = ranks
    held[ranks, side + ranks // side % side] = ranks
    for step in forward(grid).checked_steps():
        before = held.copy()
        for src, dst, lo, hi in zip(step.src, step.dst, step.lo, step.hi, strict=True):
            held[dst, lo:hi] = before[src, lo:hi]
    column = ranks[:, None] % side + side * np.arange(side) + side * side * (ranks[:, None] // side**2)
    row = ranks[:, None] // side * side + np.arange(side)
    assert (held == np.hstack([row, column])).all()
