# SPDX-License-Identifier: Apache-2.0
"""Every collective without a detour: each sender sends straight to each receiver.

All in one step, the fewest, for short messages and few ranks: a rank exchanges with all others at
once.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from commrt.algorithm import Algorithm
from commrt.algorithms.arguments import (
    require_maker,
    require_root,
    require_step_and_ranks,
    require_whole,
)
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.parts import backwards, two_levels
from commrt.algorithms.registration import (
    Nodes,
    Registration,
    Shape,
    all_but_one,
    twice_all_but_one,
)
from commrt.algorithms.ring import Ring
from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, IntArray, Schedule, Step

DIRECT = "direct"
MOST_RANKS = 1024
"""Most ranks that all exchange with all others in one step."""
MOST_IN_ONE_SHOT = 16


@lru_cache
def broadcast(p: int, root: int = 0) -> Schedule:
    """Copy the root's buffer to all ranks.

    Cost: 1 step; the root sends p - 1 buffers.

    >>> print(broadcast(3, root=1))
    direct broadcast: 3 ranks, 1 chunk
      0  copy  1->0 [0:1)  1->2 [0:1)
    """
    others = _others(p, root, "broadcast")
    return _one_step(
        "direct broadcast", p, 1, lambda: Step.of(src=root, dst=others, lo=0, hi=1, combine=COPY)
    )


@lru_cache
def reduce(p: int, root: int = 0) -> Schedule:
    """Sum all ranks' buffers at the root: `broadcast` backwards.

    Cost: 1 step; each rank but the root sends the buffer, and the root receives p - 1 buffers.
    """
    return backwards(broadcast(p, root), ADD, "direct reduce")


@lru_cache
def scatter(p: int, root: int = 0) -> Schedule:
    """Copy chunk r from the root to rank r.

    Cost: 1 step; the root sends (p - 1)/p of the buffer.

    >>> print(scatter(3, root=1))
    direct scatter: 3 ranks, 3 chunks
      0  copy  1->0 [0:1)  1->2 [2:3)
    """
    others = _others(p, root, "scatter")
    return _one_step(
        "direct scatter",
        p,
        p,
        lambda: Step.of(src=root, dst=others, lo=others, hi=others + 1, combine=COPY),
    )


@lru_cache
def gather(p: int, root: int = 0) -> Schedule:
    """Copy chunk r from rank r to the root: `scatter` backwards.

    Cost: 1 step; each rank but the root sends 1/p of the buffer.
    """
    return backwards(scatter(p, root), COPY, "direct gather")


@lru_cache
def all_gather(p: int) -> Schedule:
    """Copy chunk r from rank r to all ranks.

    Cost: 1 step; (p - 1)/p of the buffer sent per rank.

    >>> print(all_gather(3))
    direct all-gather: 3 ranks, 3 chunks
      0  copy  0->1 [0:1)  0->2 [0:1)  1->0 [1:2)  1->2 [1:2)  2->0 [2:3)  2->1 [2:3)
    """

    def step() -> Step:
        src, dst = _pairs(p)
        return Step.of(src=src, dst=dst, lo=src, hi=src + 1, combine=COPY)

    return _one_step("direct all-gather", _limited(p), p, step)


@lru_cache
def reduce_scatter(p: int) -> Schedule:
    """Sum chunk r over all ranks at rank r: `all_gather` backwards.

    Cost: 1 step; (p - 1)/p of the buffer sent per rank.
    """
    return backwards(all_gather(p), ADD, "direct reduce-scatter")


@lru_cache
def all_reduce(p: int) -> Schedule:
    """Sum over all ranks at every rank: rank r adds chunk r up, and sends the sum to all.

    Cost: 2 steps; 2(p - 1)/p of the buffer sent per rank.

    >>> print(all_reduce(2))
    direct: 2 ranks, 2 chunks
      0  add  1->0 [0:1)  0->1 [1:2)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    return reduce_scatter(p).then(all_gather(p), DIRECT)


@lru_cache
def one_shot(p: int) -> Schedule:
    """Sum over all ranks at every rank in one step: each sends its buffer to all others.

    Each adds all up in order of ranks. So a sum has the same bits as that of `all_reduce`. Cost: 1
    step; p - 1 buffers sent per rank. Raises `UsageError` for more than 16 ranks, as each receives
    all buffers.

    >>> print(one_shot(3))
    one-shot: 3 ranks, 1 chunk
      0  add  0->1 [0:1)  0->2 [0:1)  1->0 [0:1)  1->2 [0:1)  2->0 [0:1)  2->1 [0:1)
    """
    if p > MOST_IN_ONE_SHOT:
        raise UsageError(
            f"one-shot takes up to {MOST_IN_ONE_SHOT} ranks, as each receives all buffers, and not"
            f" {p:,}"
        )

    def step() -> Step:
        src, dst = _pairs(p)
        return Step.of(src=src, dst=dst, lo=0, hi=1, combine=ADD)

    return _one_step("one-shot", p, 1, step)


@lru_cache
def all_to_all(p: int) -> Schedule:
    """Copy chunk s * p + d from rank s to rank d, for all s and d.

    Cost: 1 step; a rank sends p - 1 of the p * p chunks.

    >>> print(all_to_all(2))
    direct all-to-all: 2 ranks, 4 chunks
      0  copy  0->1 [1:2)  1->0 [2:3)
    """

    def step() -> Step:
        src, dst = _pairs(p)
        return Step.of(src=src, dst=dst, lo=src * p + dst, hi=src * p + dst + 1, combine=COPY)

    return _one_step("direct all-to-all", _limited(p), p * p, step)


@lru_cache
def pairwise_all_to_all(p: int) -> Schedule:
    """Copy chunk s * p + d from rank s to rank d for all s and d: in step k to s + k, modulo p.

    Cost: p - 1 steps; a rank sends one of the p * p chunks in each.

    >>> print(pairwise_all_to_all(3))
    pairwise all-to-all: 3 ranks, 9 chunks
      0  copy  0->1 [1:2)  1->2 [5:6)  2->0 [6:7)
      1  copy  0->2 [2:3)  1->0 [3:4)  2->1 [7:8)
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for distance in range(1, p):
            to = (rank + distance) % p
            yield Step.of(src=rank, dst=to, lo=rank * p + to, hi=rank * p + to + 1, combine=COPY)

    return Schedule("pairwise all-to-all", p, p * p, steps)


@lru_cache
def all_reduce_within(x: int, between: Schedule) -> Schedule:
    """All-reduce ``x * y`` ranks: within groups of `x`, `between` the y groups, then within.

    Rank r is in place ``r % x`` of group ``r // x``. Cost: 2 steps and those of `between`; a rank
    sends 2(x - 1)/x of the buffer within its group, and 1/x of what `between` sends.

    >>> print(all_reduce_within(2, all_reduce(2)))
    direct 2x2: 4 ranks, 4 chunks
      0  add  1->0 [0:2)  0->1 [2:4)  3->2 [0:2)  2->3 [2:4)
      1  add  2->0 [0:1)  0->2 [1:2)  3->1 [2:3)  1->3 [3:4)
      2  copy  0->2 [0:1)  2->0 [1:2)  1->3 [2:3)  3->1 [3:4)
      3  copy  0->1 [0:2)  1->0 [2:4)  2->3 [0:2)  3->2 [2:4)
    """
    name = f"direct {x}x{between.ranks}" + f", {between.name}" * (between.name != DIRECT)
    return two_levels(reduce_scatter(x), between, all_gather(x), name)


@dataclass(frozen=True, slots=True, repr=False)
class Direct:
    """All-reduce in two steps, in which every rank exchanges with all others; see `all_reduce`.

    For short messages and few ranks, for ranks of one host, and for wires of few bits. `within` is
    the number of ranks of a host: these sum among themselves first, and only a part of the sum
    crosses between hosts (`all_reduce_within`), directly, or by the all-reduce `between`. Raises
    `UsageError` for more than 1,024 ranks that exchange at once, and for ranks that do not fill
    hosts.

    >>> Direct(within=2, between=Direct()).schedule(0, 4).name, Direct(within=4, between=Direct())
    ('direct 2x2', Direct(within=4, between=Direct(within=1)))
    """

    within: int = 1
    """Consecutive ranks that exchange among themselves first."""
    between: Algorithm | None = None
    """The all-reduce between hosts, such as ``Ring()``; None for a direct one."""

    def __post_init__(self) -> None:
        require_whole("within", self.within)
        if self.between is not None and self.within == 1:
            raise UsageError(
                f"between={self.between!r:.80} without within=: give the number of ranks of a"
                " host too"
            )
        if self.between is not None:
            require_maker("between", self.between)

    def __repr__(self) -> str:
        between = "" if self.between is None else f", between={self.between!r}"
        return f"Direct(within={self.within}{between})"

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return `all_reduce`, or `all_reduce_within`."""
        require_step_and_ranks(step, ranks)
        if ranks % self.within:
            raise UsageError(
                f"{ranks} ranks do not fill hosts of within={self.within}: use Direct()"
            )
        if self.within in (1, ranks):
            return all_reduce(ranks)
        hosts = ranks // self.within
        between = all_reduce(hosts) if self.between is None else self.between.schedule(step, hosts)
        return all_reduce_within(self.within, between)


def _one_step(name: str, p: int, chunks: int, step: Callable[[], Step]) -> Schedule:
    """Return the schedule of one step; for one rank, of none."""
    return Schedule(name, p, chunks, lambda: iter([step()] if p > 1 else []))


def _others(p: int, root: int, what: str) -> IntArray:
    require_root(p, root, what)
    return np.delete(np.arange(p), root)


def _pairs(p: int) -> tuple[IntArray, IntArray]:
    """Return all pairs of different ranks (src, dst), sorted."""
    src, dst = np.divmod(np.arange(p * p), p)
    different = src != dst
    return src[different], dst[different]


def _limited(p: int) -> int:
    if p > MOST_RANKS:
        raise UsageError(
            f"{p:,} ranks that all exchange with all others at once are too many: a direct schedule"
            f" takes up to {MOST_RANKS:,} ranks"
        )
    return p


MOST_TRIED = 64
"""Most ranks of a node that ``commrt plan`` lets exchange with all others at once.

Between nodes it does not: many that send to one node at once share its card, which no price knows.
"""


def _shapes(nodes: Nodes) -> Iterator[Shape]:
    within = nodes.within
    if 2 < nodes.ranks <= min(nodes.per_node, MOST_TRIED):
        yield Shape(Direct())
    if 2 < within <= MOST_TRIED:  # of 2, the torus and halving-doubling are that
        yield Shape(Direct(within, Ring()), 2 * nodes.ranks // within)
        yield Shape(Direct(within, HalvingDoubling()))


def _one(_: int) -> int:
    return 1


def _one_each(p: int) -> int:
    return p - 1


def _to_each_other(p: int) -> Fraction:
    return Fraction(p - 1, p * p)


REGISTERED = (
    Registration("broadcast", "direct", broadcast, _one, sent=_one_each),
    Registration("reduce", "direct", reduce, _one, sent=lambda _: 1),
    Registration("gather", "direct", gather, _one, sent=lambda p: Fraction(1, p)),
    Registration("scatter", "direct", scatter, _one, sent=all_but_one),
    Registration("all_gather", "direct", all_gather, _one, sent=all_but_one),
    Registration("reduce_scatter", "direct", reduce_scatter, _one, sent=all_but_one),
    Registration(
        "all_reduce",
        "direct",
        all_reduce,
        steps=lambda _: 2,
        sent=twice_all_but_one,
        algorithm=Direct,
        shapes=_shapes,
    ),
    Registration("all_reduce", "one_shot", one_shot, _one, sent=_one_each),
    Registration("all_to_all", "pairwise", pairwise_all_to_all, _one_each, sent=_to_each_other),
    Registration("all_to_all", "direct", all_to_all, _one, sent=_to_each_other),
)
