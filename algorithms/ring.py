# SPDX-License-Identifier: Apache-2.0
"""The ring, and several rings at once: as few bytes as an all-reduce can send, in many steps.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

Pure functions; `REGISTERED` says what commrt offers of them, at which cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd

import numpy as np

from commrt.algorithms.arguments import require_step_and_ranks, require_whole
from commrt.algorithms.registration import (
    Nodes,
    Registration,
    Shape,
    all_but_one,
    twice_all_but_one,
)
from commrt.errors import UsageError
from commrt.schedule import ADD, COPY, Schedule, Step, beside


@lru_cache
def reduce_scatter(p: int) -> Schedule:
    """Sum chunk r over all ranks at rank r.

    Cost: p - 1 steps; (p - 1)/p of the buffer sent per rank.

    >>> print(reduce_scatter(3))
    ring reduce-scatter: 3 ranks, 3 chunks
      0  add  0->1 [2:3)  1->2 [0:1)  2->0 [1:2)
      1  add  0->1 [1:2)  1->2 [2:3)  2->0 [0:1)
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for s in range(p - 1):
            chunk = (rank - s - 1) % p
            yield Step.of(src=rank, dst=(rank + 1) % p, lo=chunk, hi=chunk + 1, combine=ADD)

    return Schedule("ring reduce-scatter", p, p, steps)


@lru_cache
def all_gather(p: int) -> Schedule:
    """Copy chunk r from rank r to all ranks.

    Cost: p - 1 steps; (p - 1)/p of the buffer sent per rank.
    """

    def steps() -> Iterator[Step]:
        rank = np.arange(p)
        for s in range(p - 1):
            chunk = (rank - s) % p
            yield Step.of(src=rank, dst=(rank + 1) % p, lo=chunk, hi=chunk + 1, combine=COPY)

    return Schedule("ring all-gather", p, p, steps)


@lru_cache
def all_reduce(p: int) -> Schedule:
    """Sum over all ranks at every rank.

    Cost: 2(p - 1) steps; 2(p - 1)/p of the buffer sent per rank.

    >>> print(all_reduce(2))
    ring: 2 ranks, 2 chunks
      0  add  0->1 [1:2)  1->0 [0:1)
      1  copy  0->1 [0:1)  1->0 [1:2)
    """
    return reduce_scatter(p).then(all_gather(p), "ring")


@dataclass(frozen=True, slots=True)
class Ring:
    """All-reduce on one ring; see `all_reduce`."""

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return `all_reduce`, whatever the step."""
        require_step_and_ranks(step, ranks)
        return all_reduce(ranks)


@lru_cache
def all_reduce_on_rings(nodes: int, per_node: int, count: int) -> Schedule:
    """Sum over all ranks at every rank, on `count` rings at once, each with a part of the buffer.

    All rings pass the nodes in order. Ring c begins `c * per_node / count` ranks further on in each
    node, so that each ring leaves nodes by another rank, and by that rank's network card. Cost: the
    steps and bytes of `all_reduce`, each step using two peers per ring.

    >>> for line in str(all_reduce_on_rings(2, 2, 2)).splitlines()[:4]:
    ...     print(line[:62])
    2 rings: 4 ranks, 8 chunks
      0  add  0->1 [3:4)  1->2 [0:1)  2->3 [1:2)  3->0 [2:3)  1->0
      1  add  0->1 [2:3)  1->2 [3:4)  2->3 [0:1)  3->0 [1:2)  1->0
      2  add  0->1 [1:2)  1->2 [2:3)  2->3 [3:4)  3->0 [0:1)  1->0
    """
    p = nodes * per_node
    node, place = np.divmod(np.arange(p), per_node)
    orders = (
        node * per_node + (place + ring * per_node // count) % per_node for ring in range(count)
    )
    rings = [
        all_reduce(p).over(order).within(p * ring, p * (ring + 1), p * count)
        for ring, order in enumerate(orders)
    ]
    return beside(rings, f"{count} rings")


@dataclass(frozen=True, slots=True)
class Rings:
    """All-reduce on several rings, one per network card of a node, as NCCL's rings are.

    See `all_reduce_on_rings`. `per_node` consecutive ranks share a node; by default as many as
    there are rings, or the largest divisor of that by which the ranks fill nodes. There are at most
    as many rings as ranks in a node. Raises `UsageError` for ranks that do not fill nodes of a
    given `per_node`.

    >>> Rings(8).schedule(0, 16).name
    '8 rings'
    """

    count: int = 2
    per_node: int | None = None

    def __post_init__(self) -> None:
        require_whole("count", self.count)
        if self.per_node is None:
            return
        require_whole("per_node", self.per_node)
        if self.count > self.per_node:
            raise UsageError(
                f"{self.count} rings need as many ranks in a node, to leave it by: it has"
                f" {self.per_node}"
            )

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the rings, whatever the step."""
        require_step_and_ranks(step, ranks)
        per_node = min(self.per_node or gcd(self.count, ranks), ranks)
        if ranks % per_node:
            raise UsageError(
                f"{ranks} ranks do not fill nodes of {per_node}: use Ring(), or another per_node"
            )
        return all_reduce_on_rings(ranks // per_node, per_node, min(self.count, per_node))


COMPARED_RANKS = 1024
"""Up to so many ranks ``commrt plan`` prices rings whatever they cost, to compare with."""


def _shapes(nodes: Nodes) -> Iterator[Shape]:
    """Yield the ring, or as many as nodes have network cards, as NCCL has.

    One ring might use one card, and all else would look fast beside it.
    """
    count = min(nodes.cards, nodes.within)
    steps = _all_reduce_steps(nodes.ranks) if nodes.ranks > COMPARED_RANKS else 0
    yield Shape(Rings(count, nodes.within) if count > 1 else Ring(), steps)


def _half_steps(p: int) -> int:
    return p - 1


def _all_reduce_steps(p: int) -> int:
    return 2 * (p - 1)


REGISTERED = (
    Registration("all_gather", "ring", all_gather, _half_steps, all_but_one),
    Registration("reduce_scatter", "ring", reduce_scatter, _half_steps, all_but_one),
    Registration(
        "all_reduce",
        "ring",
        all_reduce,
        _all_reduce_steps,
        twice_all_but_one,
        algorithm=Ring,
        shapes=_shapes,
    ),
    Registration(
        "all_reduce",
        "rings",
        partial(Rings().schedule, 0),
        _all_reduce_steps,
        twice_all_but_one,
        algorithm=Rings,
        for_groups=False,  # a group's members need not fill nodes
    ),
)
