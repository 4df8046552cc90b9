# SPDX-License-Identifier: Apache-2.0
"""The double binary tree: a tree for each half of the buffer; few steps, nearly a ring's bytes.

Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009. In one tree the leaves are every other rank; the other tree has its leaves where the first has
none. So each rank adds up and passes on in one tree only, and all links are busy. Slices of the
buffer follow each other through the trees.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from commrt.algorithms import ring
from commrt.algorithms.arguments import require_step_and_ranks, require_whole
from commrt.algorithms.parts import two_levels
from commrt.algorithms.registration import Nodes, Registration, Shape, doublings
from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, IntArray, Schedule, Step

MAX_SLICES = 1 << 12


def parents(p: int) -> IntArray:
    """Return the parent of each rank [p] in the first tree: rank 0 is the root, odd ranks leaves.

    >>> parents(8).tolist()
    [-1, 2, 4, 2, 0, 6, 4, 6]
    """
    rank = np.arange(p)
    own = rank & -rank  # the lowest bit that is set: the height in the tree
    up = (rank - own) | 2 * own
    up = np.where(up < p, up, rank - own)
    return np.where(rank == 0, -1, up)


def second_tree(p: int) -> IntArray:
    """Return the rank in each place of the second tree, so that odd places are not odd ranks."""
    places = np.arange(p)
    return p - 1 - places if p % 2 == 0 else (places + 1) % p


def _depths(up: IntArray) -> IntArray:
    depths = np.zeros_like(up)
    above = up.copy()
    while (below := above >= 0).any():
        depths[below] += 1
        above[below] = up[above[below]]
    return depths


@lru_cache
def all_reduce(p: int, slices: int | None = None) -> Schedule:
    """Sum over all ranks at every rank: each slice climbs to its tree's root, and comes down again.

    Cost: slices + 2 D - 1 steps for trees of depth D = ceil(log2(p)); a rank sends at most 2
    buffers. None makes 8 D slices: then trees that fill and empty take a fifth of the steps.

    >>> print(all_reduce(2, slices=1))
    double tree: 2 ranks, 2 chunks
      0  add  1->0 [0:1)  0->1 [1:2)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    up = parents(p)
    places = np.flatnonzero(up >= 0)
    level = _depths(up)[places]
    depth = int(level.max(initial=0))
    cut = max(8 * depth, 1) if slices is None else slices
    # a row per tree
    trees = np.stack((np.arange(p), second_tree(p)))
    child = trees[:, places]
    parent = trees[:, up[places]]
    chunk = np.array([[0], [cut]])

    climb = Step.of(child, parent, chunk, chunk + 1, ADD)
    descent = Step.of(parent, child, chunk, chunk + 1, COPY)
    count = cut + 2 * depth - 1 if p > 1 else 0

    def flow(first: Step, begin: IntArray) -> Schedule:
        """Let slices follow a tree's first one, whose transfer t is in step begin[t]."""

        def steps() -> Iterator[Step]:
            for number in range(count):
                part = number - np.tile(begin, 2)
                now = (part >= 0) & (part < cut)
                src, dst, lo, hi, combine, weight = first.rows(now).columns
                yield Step(src, dst, lo + part[now], hi + part[now], combine, weight)

        return Schedule("flow", p, 2 * cut, steps)

    return flow(climb, depth - level).beside(flow(descent, depth + level - 1), "double tree")


@lru_cache
def _all_reduce_within(x: int, y: int, slices: int | None) -> Schedule:
    return two_levels(
        ring.reduce_scatter(x), all_reduce(y, slices), ring.all_gather(x), f"{x} x double tree"
    )


@dataclass(frozen=True, slots=True)
class DoubleTree:
    """All-reduce on two trees; see `all_reduce`.

    `within` is the number of ranks of a node: these add up a part each on a ring, each part goes
    through the trees of all nodes, and the ring of the node gathers the sums. Raises `UsageError`
    for ranks that do not fill nodes.
    """

    within: int = 1
    """Consecutive ranks of a node."""
    slices: int | None = None
    """Parts of the buffer that follow each other; more for long buffers.

    By default 8 for each level of the tree.
    """

    def __post_init__(self) -> None:
        require_whole("within", self.within)
        if self.slices is not None:
            require_whole("slices", self.slices, most=MAX_SLICES)

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the trees, whatever the step."""
        require_step_and_ranks(step, ranks)
        if ranks % self.within:
            raise UsageError(
                f"{ranks} ranks do not fill nodes of within={self.within}: use DoubleTree()"
            )
        if self.within == 1:
            return all_reduce(ranks, self.slices)
        return _all_reduce_within(self.within, ranks // self.within, self.slices)


TRIED_SLICES = (4, 32)
"""Slices that ``commrt plan`` tries: few for short buffers, many for long ones."""


def _shapes(nodes: Nodes) -> Iterator[Shape]:
    return (Shape(DoubleTree(nodes.within, slices)) for slices in TRIED_SLICES)


REGISTERED = (
    Registration(
        "all_reduce",
        "double_tree",
        all_reduce,
        steps=lambda p: 10 * doublings(p) - 1,
        sent=lambda _: 2,
        is_limit=True,  # trees are uneven
        algorithm=DoubleTree,
        shapes=_shapes,
    ),
)
