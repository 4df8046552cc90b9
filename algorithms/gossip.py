# SPDX-License-Identifier: Apache-2.0
"""Gossip: in each step every rank exchanges with one other, and partners change, so that all hear of all.

Daily, Vishnu, Siegel, Warfel and Amatya, "GossipGraD: Scalable Deep Learning using Gossip Communication based
Asynchronous Gradient Descent", 2018. A round of ``ceil(log2 p)`` steps, the period, spreads what each rank knows to
all; then the ranks change places, by a permutation that follows from the seed and the number of the period alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from commrt.algorithms import ring
from commrt.errors import UsageError
from commrt.schedule import MIX, IntArray, Schedule, Step, empty

__all__ = ["Gossip", "Topology", "dissemination", "hypercube", "period", "places"]

Topology = Literal["dissemination", "hypercube"]
Payload = Literal["weights", "gradients"]

HALF = 0.5
LATE = 0.25
"""The weight of a message that comes a step late; with a half, two ranks would swing for ever."""


def period(p: int) -> int:
    """Steps until what one rank knows has reached all: ``ceil(log2 p)``, and 1 for one rank.

    >>> [period(p) for p in (1, 2, 3, 4, 5, 100)]
    [1, 1, 2, 2, 3, 7]
    """
    return max(1, (p - 1).bit_length())


@lru_cache
def dissemination(p: int, k: int, weight: float = HALF) -> Schedule:
    """Rank r sends to rank ``r + 2^k``, and hears from rank ``r - 2^k``, around a circle; any p.

    Cost: 1 step; the whole buffer sent per rank.

    >>> print(dissemination(3, 0))
    dissemination 0: 3 ranks, 1 chunk
      0  mix(0.5)  0->1 [0:1)  1->2 [0:1)  2->0 [0:1)
    """
    rank = np.arange(p)
    step = Step.of(src=rank, dst=(rank + (1 << k)) % p, lo=0, hi=1, combine=MIX, weight=weight)
    return Schedule(f"dissemination {k}", p, 1, lambda: iter([step]))


@lru_cache
def hypercube(p: int, k: int, weight: float = HALF) -> Schedule:
    """Ranks swap with the one whose number differs in bit k; p is a power of two.

    Cost: 1 step; the whole buffer sent per rank. Raises `UsageError` for another p: some ranks would have no partner
    in some steps, and some pairs would never hear of each other.
    """
    if p & (p - 1):
        raise UsageError(
            f"a hypercube of {p} ranks has ranks without a partner, which would not hear of all others: use the "
            "topology 'dissemination', which takes any number"
        )
    rank = np.arange(p)
    step = Step.of(src=rank, dst=rank ^ (1 << k), lo=0, hi=1, combine=MIX, weight=weight)
    return Schedule(f"hypercube {k}", p, 1, lambda: iter([step]))


@lru_cache
def places(p: int, number: int, seed: int) -> IntArray:
    """Who stands where in period `number`: entry i is the rank at place i. In period 0 everybody at their own.

    The same on every machine, and nobody's random numbers are touched.
    """
    if number == 0:
        return np.arange(p)
    keys = np.random.SeedSequence([seed, number]).generate_state(p, np.uint64)  # documented never to change
    return np.argsort(keys, kind="stable")


ROUNDS = {"dissemination": dissemination, "hypercube": hypercube}


@dataclass(frozen=True, slots=True)
class Gossip:
    """One partner per step, as a schedule that mixes; any rank count with `topology` "dissemination".

    `rotate` lets partners change places after each period, so that all meet; `seed` says how.

    `payload` says what is exchanged. "weights", after the optimizer's step, keeps replicas together. "gradients",
    before it, is what the paper's abstract says: nothing pulls replicas together then, and they drift apart; meant for
    comparison, or with `Replica.consolidate` now and then.

    `staleness` 1 mixes with what the partner of the step *before* sent, so that a slow partner is not waited for; for
    weights only. `weight` is the received share: 1/2, or 1/4 if it is late (more oscillates).

    `within` ranks stand in a row, such as those of one node that share its network port: they average among
    themselves, and each gossips with other rows for its share of the buffer only, so a row sends each byte once.
    """

    topology: Topology = "dissemination"
    rotate: bool = True
    payload: Payload = "weights"
    staleness: int = 0
    within: int = 1
    weight: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require_one_of("topology", self.topology, tuple(ROUNDS))
        _require_one_of("payload", self.payload, ("weights", "gradients"))
        if not isinstance(self.rotate, bool):
            raise UsageError(f"rotate={self.rotate!r:.80}: give True or False")
        if type(self.staleness) is not int or self.staleness not in (0, 1):
            raise UsageError(f"staleness={self.staleness!r:.80}: messages may be 0 or 1 step late; two diverge")
        if self.staleness and self.payload == "gradients":
            raise UsageError("staleness=1 is for payload='weights': a late gradient belongs to weights that are gone")
        if type(self.seed) is not int or self.seed < 0:
            raise UsageError(f"seed={self.seed!r:.80}: give a whole number from 0 on")
        if type(self.within) is not int or self.within < 1:
            raise UsageError(f"within={self.within!r:.80}: give the number of ranks in a row, such as those of a node")
        if isinstance(self.weight, bool) or not isinstance(self.share, int | float):
            raise UsageError(f"weight={self.weight!r:.80}: give a number, or None for the one that is usual")
        if not 0 < self.share <= HALF or (self.staleness and self.share >= HALF):
            most = "below 1/2, as late messages with 1/2 swing for ever" if self.staleness else "at most 1/2"
            raise UsageError(f"weight={self.weight:g}: the share of what is received must be above 0 and {most}")

    @property
    def share(self) -> float:
        """The weight of what is received."""
        return self.weight if self.weight is not None else (LATE if self.staleness else HALF)

    def period(self, ranks: int) -> int:
        """Steps after which partners change places."""
        return period(self._rows(ranks))

    def among(self, ranks: int) -> Gossip:
        """This, or what is nearest to it and takes `ranks` ranks: for those who are left when some are lost.

        >>> Gossip("hypercube").among(7).topology, Gossip(within=4).among(6).within
        ('dissemination', 1)
        """
        within = self.within if ranks % self.within == 0 else 1
        rows = ranks // within
        return replace(self, within=within, topology="dissemination" if rows & (rows - 1) else self.topology)

    def schedule(self, step: int, ranks: int) -> Schedule:
        """The exchange of `step`; sums `within` ranks, so divide by that.

        Raises `UsageError` for a rank count that rows do not divide or that the topology does not take.
        """
        rows = self._rows(ranks)
        number, k = divmod(step, self.period(ranks))
        return _schedule(self.topology, rows, k, number * self.rotate, self.seed, self.share, self.within)

    def _rows(self, ranks: int) -> int:
        if ranks % self.within:
            raise UsageError(
                f"within={self.within} does not divide {ranks} ranks: all rows must be of one length, so use a divisor"
            )
        return ranks // self.within


@lru_cache
def _schedule(topology: str, rows: int, k: int, number: int, seed: int, share: float, within: int) -> Schedule:
    """Objects that stay for a while, so that what was made of them can be kept."""
    p = rows * within
    across = ROUNDS[topology](rows, k, share).over(places(rows, number, seed)) if rows > 1 else empty(1)
    if within == 1:
        return across
    rank = np.arange(p).reshape(rows, within)
    scatter, gather = (make(within).over(rank, p) for make in (ring.reduce_scatter, ring.all_gather))
    column = across.within(0, 1, within).over(rank.T, p, shift=np.arange(within))
    return scatter.then(column).then(gather, f"{across.name} of rows of {within}")


def _require_one_of(what: str, given: str, offered: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in offered:
        raise UsageError(f"{what}={given!r:.80}: choose one of {', '.join(offered)}")
