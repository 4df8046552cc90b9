# SPDX-License-Identifier: Apache-2.0
"""The 2D torus: reduce-scatter along rows, all-reduce along columns, all-gather along rows.

Mikami, Suganuma, U-chupala, Tanaka and Kageyama, "Massively Distributed SGD: ImageNet/ResNet-50
Training in a Flash", 2018/2019, section on 2D-Torus all-reduce. Rank r is in column ``r % X`` of
row ``r // X``.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from commrt.algorithms import ring
from commrt.algorithms.arguments import require_step_and_ranks
from commrt.algorithms.parts import folded, two_levels
from commrt.algorithms.registration import Nodes, Registration, Shape, twice_all_but_one
from commrt.errors import UsageError
from commrt.schedule import Schedule

Grid = tuple[int, int]
"""(X, Y): ranks in a row, ranks in a column."""


def all_reduce(x: int, y: int) -> Schedule:
    """Sum over ``x * y`` ranks at every rank, as three compositions of rings.

    Cost: 2(x - 1) + 2(y - 1) steps; 2(p - 1)/p of the buffer sent per rank, of which 2(y - 1)/p
    along columns.

    >>> print(all_reduce(2, 2))
    torus 2x2: 4 ranks, 4 chunks
      0  add  0->1 [2:4)  1->0 [0:2)  2->3 [2:4)  3->2 [0:2)
      1  add  0->2 [1:2)  2->0 [0:1)  1->3 [3:4)  3->1 [2:3)
      2  copy  0->2 [0:1)  2->0 [1:2)  1->3 [2:3)  3->1 [3:4)
      3  copy  0->1 [0:2)  1->0 [2:4)  2->3 [0:2)  3->2 [2:4)
    """
    return two_levels(
        ring.reduce_scatter(x), ring.all_reduce(y), ring.all_gather(x), f"torus {x}x{y}"
    )


def both_ways(x: int, y: int) -> Schedule:
    """Sum half of the buffer row-first and half column-first, so that all links are always busy.

    Cost: the steps and bytes of `all_reduce`, each step using two peers.
    """
    p = x * y
    row_first = all_reduce(x, y).within(0, p, 2 * p)
    column_first = (
        all_reduce(y, x).over(np.arange(p).reshape(y, x).T.reshape(-1)).within(p, 2 * p, 2 * p)
    )
    return row_first.beside(column_first, f"torus {x}x{y} both ways")


def best_grid(p: int) -> Grid:
    """Return the most square (X, Y) with X * Y = p and X >= Y, which has the fewest steps.

    >>> best_grid(12), best_grid(97)
    ((4, 3), (97, 1))
    """
    y = max(d for d in range(1, int(p**0.5) + 1) if p % d == 0)
    return p // y, y


def fold_core(p: int) -> int:
    """Return how many of `p` ranks form the grid: all, or all but one if `p` is a prime above 3.

    A prime has only the grid of a ring, 2(p - 1) steps; folding one rank into the grid of p - 1
    costs 2.
    """
    _, y = best_grid(p)
    return p - 1 if y == 1 and p > 3 else p


@lru_cache
def _build(grid: Grid | None, two_ways: bool, ranks: int) -> Schedule:
    x, y = grid or best_grid(fold_core(ranks))
    return folded((both_ways if two_ways else all_reduce)(x, y), ranks)


@dataclass(frozen=True, slots=True)
class Torus2D:
    """All-reduce on a 2D torus; any rank count.

    `grid` is (X, Y), ranks in a row and in a column, and must fit the rank count. None picks the
    most square grid, and folds one rank of a prime into it (see `fold_core`). `both_ways` runs half
    of the buffer row-first and half column-first in the same steps.
    """

    grid: Grid | None = None
    both_ways: bool = False

    def __post_init__(self) -> None:
        grid = (1, 1) if self.grid is None else self.grid
        if not isinstance(grid, tuple) or [type(side) for side in grid] != [int, int]:
            raise UsageError(
                f"grid={self.grid!r:.80}: give (X, Y), ranks in a row and in a column, as in"
                " grid=(4, 3)"
            )
        if not isinstance(self.both_ways, bool):
            raise UsageError(f"both_ways={self.both_ways!r:.80}: give True or False")

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the torus of any step; raises `UsageError` if the grid does not fit `ranks`."""
        require_step_and_ranks(step, ranks)
        if self.grid is not None and (min(self.grid) < 1 or self.grid[0] * self.grid[1] != ranks):
            x, y = best_grid(ranks)
            raise UsageError(
                f"a grid of {self.grid[0]} x {self.grid[1]} does not fit {ranks} ranks: "
                f"leave grid out, or use one whose sides multiply to {ranks}, such as {x} x {y}"
            )
        return _build(self.grid, self.both_ways, ranks)


def _shapes(nodes: Nodes) -> Iterator[Shape]:
    """Yield the torus on every grid, each both ways too; that of a prime folds one rank in."""
    p = nodes.ranks
    sides = [side for side in range(2, p // 2 + 1) if p % side == 0]
    if not sides and p > 3:
        yield Shape(Torus2D())
    for side in sides:
        grid = (side, p // side)
        steps = 2 * sum(grid) - 4
        yield Shape(Torus2D(grid), steps)
        yield Shape(Torus2D(grid, both_ways=True), steps)


def _steps(p: int) -> int:
    core = fold_core(p)
    x, y = best_grid(core)
    return 2 * (x - 1) + 2 * (y - 1) + 2 * (core < p)


REGISTERED = (
    Registration(
        "all_reduce",
        "torus2d",
        partial(Torus2D().schedule, 0),
        _steps,
        sent=lambda p: twice_all_but_one(p) if fold_core(p) == p else 3,
        is_limit=True,  # reached where a rank is folded in
        algorithm=Torus2D,
        shapes=_shapes,
    ),
)
