# SPDX-License-Identifier: Apache-2.0
"""Schedules of 2.5-D tensor parallelism."""

import numpy as np
import pytest

from commrt.algorithms.summa import Grid, forward, sum_over_depths
from commrt.schedule import ADD


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


@pytest.mark.parametrize("depth", range(1, 5))
def test_sum_over_depths_sums_each_place_over_the_layers(depth: int) -> None:
    grid = Grid(2, depth)
    schedule = sum_over_depths(grid)
    held = np.repeat(2 ** np.arange(grid.world)[:, None], schedule.chunks, axis=1)
    expected = np.tile(held.reshape(depth, 4, -1).sum(axis=0), (depth, 1))
    for step in schedule.checked_steps():
        before = held.copy()
        for src, dst, lo, hi, how in zip(step.src, step.dst, step.lo, step.hi, step.combine, strict=True):
            held[dst, lo:hi] = before[src, lo:hi] + (held[dst, lo:hi] if how == ADD else 0)
    assert (held == expected).all()
