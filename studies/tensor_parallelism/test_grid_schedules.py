# SPDX-License-Identifier: Apache-2.0
"""Schedules of 2.5-D tensor parallelism: proven, counted, and equal to one matrix product."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from grid_schedules import Grid, backward, backward_goal, forward, forward_goal
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt import UsageError
from commrt.proof.replay import verify
from commrt.schedule import ADD

GRIDS = [Grid(side, depth) for side in range(1, 5) for depth in range(1, 5)]
PASSES = [(forward, forward_goal), (backward, backward_goal)]

CASES = [(grid, slices) for grid in GRIDS for slices in (None, 1, 5)]


@pytest.mark.parametrize(("schedule", "wanted"), PASSES, ids=["forward", "backward"])
def test_rows_columns_and_layers_are_proven_as_one_schedule(schedule, wanted):
    for grid, slices in CASES:
        whole = schedule(grid, 2, 3, slices)
        assert verify(whole, wanted(grid, whole.chunks, 2, 3)).counterexample is None, (grid, slices)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(1, 9))
def test_any_grid_and_any_sizes_of_blocks_are_proven(side, depth, x, w, slices):
    grid = Grid(side, depth)
    for schedule, wanted in PASSES:
        whole = schedule(grid, x, w, slices)
        assert verify(whole, wanted(grid, whole.chunks, x, w)).ok


def test_a_schedule_without_one_of_its_steps_is_refuted():
    whole = backward(Grid(2, 2))
    steps, wanted = [*whole.checked_steps()], backward_goal(Grid(2, 2), whole.chunks)
    for lost in range(6):
        mutant = replace(whole, steps=lambda lost=lost: iter(steps[:lost] + steps[lost + 1 :]))
        assert not verify(mutant, wanted).ok, lost


def counted(schedule, column):
    """Return the chunks that each rank sends ("src") or receives ("dst")."""
    chunks = np.zeros(schedule.ranks, dtype=int)
    for step in schedule.checked_steps():
        np.add.at(chunks, getattr(step, column), step.hi - step.lo)
    return chunks


def test_every_rank_sends_and_receives_the_bytes_of_the_formula():
    x, w = 2, 3
    for grid, slices in CASES:
        q, d = grid.side, grid.depth
        there, back = forward(grid, x, w, slices), backward(grid, x, w, slices)
        blocks_of_one = there.chunks // (q * (x + w))
        formula = 3 * (q - 1) * (x + w) + 2 * (d - 1) / d * w
        for column in ("src", "dst"):
            moved = counted(there, column) + counted(back, column)
            assert (moved == formula * blocks_of_one).all(), (grid, slices, column)


def run(schedule, held):
    """Play `schedule` on blocks held[rank, chunk], each a matrix."""
    for step in schedule.checked_steps():
        before = held.copy()
        for src, dst, lo, hi, how in zip(step.src, step.dst, step.lo, step.hi, step.combine, strict=True):
            for chunk in range(lo, hi):
                held[dst, chunk] = before[src, chunk] + (held[dst, chunk] if how == ADD else 0)
    return held


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 1), Grid(2, 2), Grid(3, 2), Grid(3, 1)], ids=str)
def test_products_of_the_blocks_that_arrive_are_blocks_of_the_product(grid):
    q, d = grid.side, grid.depth
    draw = np.random.default_rng(0)
    x, w = draw.integers(-5, 5, (4 * q * d, 5 * q)), draw.integers(-5, 5, (5 * q, 3 * q))
    unit = forward(grid).chunks // (2 * q)
    held = np.empty((grid.world, 2 * q * unit), dtype=object)
    places = [(rank // q**2, rank // q % q, rank % q) for rank in range(grid.world)]
    own_rows = [slice(4 * (layer * q + row), 4 * (layer * q + row + 1)) for layer, row, _ in places]
    for rank, (_, row, column) in enumerate(places):
        for chunk in range(unit):
            held[rank, column * unit + chunk] = x[own_rows[rank], 5 * column : 5 * column + 5]
            held[rank, (q + row) * unit + chunk] = w[5 * row : 5 * row + 5, 3 * column : 3 * column + 3]
    run(forward(grid), held)
    for rank, (_, _, column) in enumerate(places):
        y = sum(held[rank, t * unit] @ held[rank, (q + t) * unit] for t in range(q))
        assert (y == (x @ w)[own_rows[rank], 3 * column : 3 * column + 3]).all()


def test_rows_and_columns_move_in_the_same_step():
    first = next(islice(forward(Grid(3, 2)).checked_steps(), 1))
    pairs = {*zip(first.src.tolist(), first.dst.tolist(), strict=True)}
    assert {(0, 1), (0, 3)} <= pairs


@pytest.mark.parametrize(("side", "depth"), [(0, 1), (2, 0), (-1, 1)])
def test_a_grid_without_ranks_is_refused(side, depth):
    with pytest.raises(UsageError, match="whole numbers from 1 on"):
        Grid(side, depth)


@pytest.mark.parametrize(
    ("x", "w", "slices", "says"),
    [
        (0, 1, None, "give sizes from 1 on"),
        (1, -1, None, "give sizes from 1 on"),
        (1, 1, 0, "a buffer is cut into 1, 2, ... slices"),
    ],
)
def test_blocks_without_chunks_and_chains_without_slices_are_refused(x, w, slices, says):
    with pytest.raises(UsageError, match=says):
        forward(Grid(2), x, w, slices)
