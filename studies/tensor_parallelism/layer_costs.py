# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a transformer layer whose matrices are split over all ranks, in one dimension or over a grid.

1-D: Shoeybi and others, "Megatron-LM", 2019: two all-reduces of all activations in each pass. Over a grid: see
`grid_schedules`. Layer norms, biases and the loss exchange a few numbers per token, which are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import grid_schedules
from grid_schedules import Grid

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.proof.replay import traffic
from commrt.schedule import Schedule
from commrt.tools.planning.planner import exchange_plans
from commrt.tools.planning.python_calls import short_name

__all__ = ["LayerCost", "LayerSize", "grids_of", "in_one_dimension", "layer_costs", "on_grid", "schedules_of"]

ALL_REDUCES = 4
"""Of a layer in one dimension: one for attention and one for the MLP, forward and backward."""
TRIED_SLICES = 2, 4, 8, 16, 32
"""Of chains: few for short blocks, many for long ones."""
FLOPS_PER_WEIGHT = 6
"""Of a token, forward and backward: a multiplication and an addition in each of three products."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A transformer layer, and how many tokens of all samples together pass it in a step."""

    tokens: int
    width: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of its matrices: queries, keys and values; the output of attention; the MLP."""
        h = self.width
        return (h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)

    @property
    def weights(self) -> int:
        """Elements of its matrices."""
        return sum(inputs * outputs for inputs, outputs in self.products)

    def compute_s(self, ranks: int, tflops: float) -> float:
        """Return how long `ranks` ranks of `tflops` compute its products, all equally long."""
        return FLOPS_PER_WEIGHT * self.tokens * self.weights / (ranks * tflops * 1e12)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer exchanges in a forward and a backward pass, with its soonest schedules."""

    sent: float
    """Elements that the busiest rank sends, counted in the schedules."""
    formula: float
    """Elements that each rank must receive at least, with this layout."""
    seconds: float
    """Time of all exchanges, one after the other."""
    weights: float
    """Elements of the layer's matrices that a rank holds."""
    all_reduce: Algorithm | None = None
    """In one dimension."""
    grid: Grid | None = None
    slices: int | None = None
    """Of the chains along which blocks move in rows and columns of the grid; None for trees."""

    @property
    def layout(self) -> str:
        """Return "1-D", or the sides of the grid."""
        return "1-D" if self.grid is None else str(self.grid)

    @property
    def by(self) -> str:
        """Return what names the schedules."""
        if self.all_reduce is not None:
            return short_name(self.all_reduce)
        return "trees" if self.slices is None else f"chains of {self.slices} slices"


def grids_of(ranks: int) -> list[Grid]:
    """Return the grids of `ranks` ranks with a side of 2 or more, the flattest first.

    >>> [str(grid) for grid in grids_of(64)]
    ['[8, 8, 1]', '[4, 4, 4]', '[2, 2, 16]']
    """
    sides = range(int(ranks**0.5), 1, -1)
    return [Grid(side, ranks // side**2) for side in sides if ranks % side**2 == 0]


def layer_costs(cluster: Cluster, ranks: int, size: LayerSize, itemsize: int) -> list[LayerCost]:
    """Return the cost of each layout that divides the layer, 1-D first; elements are of `itemsize` bytes.

    Raises `UsageError` if none does.
    """
    found = [in_one_dimension(cluster, ranks, size, itemsize)] if size.width % ranks == 0 else []
    found += [on_grid(cluster, grid, size, itemsize) for grid in grids_of(ranks) if _divides(grid, size)]
    if not found:
        raise UsageError(
            f"{size.tokens} tokens x width {size.width} cannot be split over {ranks} ranks: for 1-D the ranks must "
            "divide the width; for a grid [q, q, d] of as many ranks, q the width, and q * d the tokens"
        )
    return found


def in_one_dimension(cluster: Cluster, ranks: int, size: LayerSize, itemsize: int) -> LayerCost:
    """Return the cost of all-reduces of all activations, with the all-reduce that `commrt plan` would choose."""
    numel = size.tokens * size.width
    plan = exchange_plans(cluster, ranks, float(numel * itemsize))[0]
    sent = ALL_REDUCES * numel * float(traffic(plan.algorithm.schedule(0, ranks)).bytes_per_rank)
    formula = ALL_REDUCES * numel * 2 * (ranks - 1) / ranks
    return LayerCost(sent, formula, ALL_REDUCES * plan.exchange_s, size.weights / ranks, plan.algorithm)


def on_grid(cluster: Cluster, grid: Grid, size: LayerSize, itemsize: int) -> LayerCost:
    """Return the cost of distributed products, with the trees or chains that end soonest; broadcasts precede products.

    Rows and columns exchange at once, so a program that starts one after the other takes longer.
    """
    tried = [None] if grid.side == 2 else [None, *TRIED_SLICES]  # two ranks are a tree and a chain
    times_s = {slices: _seconds(cluster, grid, size, itemsize, slices) for slices in tried}
    best = min(times_s, key=times_s.__getitem__)
    sent = sum(numel * float(traffic(schedule).bytes_per_rank) for schedule, numel in schedules_of(grid, size, best))
    weights = size.weights / grid.side**2
    return LayerCost(sent, _least_received(grid, size), times_s[best], weights, grid=grid, slices=best)


def schedules_of(grid: Grid, size: LayerSize, slices: int | None) -> Iterator[tuple[Schedule, float]]:
    """Yield the schedules of the layer's products, forward and backward, each with the elements of its buffer."""
    for inputs, outputs in size.products:
        x, w = _ratio(size.tokens, outputs * grid.depth)
        numel = (size.tokens * inputs / grid.depth + inputs * outputs) / grid.side
        yield grid_schedules.forward(grid, x, w, slices), numel
        yield grid_schedules.backward(grid, x, w, slices), 2 * numel


def _seconds(cluster: Cluster, grid: Grid, size: LayerSize, itemsize: int, slices: int | None) -> float:
    pairs = schedules_of(grid, size, slices)
    return sum(Pricing(schedule, cluster).price(numel * itemsize).seconds for schedule, numel in pairs)


def _least_received(grid: Grid, size: LayerSize) -> float:
    q, d = grid.side, grid.depth
    x = sum(size.tokens * inputs for inputs, _ in size.products) / (q * q * d)
    w = size.weights / q**2
    return 3 * (q - 1) * (x + w) + 2 * (d - 1) / d * w


def _ratio(a: int, b: int) -> tuple[int, int]:
    return a // gcd(a, b), b // gcd(a, b)


def _divides(grid: Grid, size: LayerSize) -> bool:
    return size.width % grid.side == 0 and size.tokens % (grid.side * grid.depth) == 0
