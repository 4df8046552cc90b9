# SPDX-License-Identifier: Apache-2.0
"""Gossip: in each step every rank exchanges with one other, and partners change.

Daily, Vishnu, Siegel, Warfel and Amatya, "GossipGraD: Scalable Deep Learning using Gossip
Communication based Asynchronous Gradient Descent", 2018. In a period of ``ceil(log2 p)`` steps each
rank's value reaches all ranks. Then the ranks are permuted. The permutation depends only on the
seed and the number of the period. Pure functions; `Gossip` says in text what trains with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from commrt.algorithm import SYNCHRONOUS
from commrt.algorithms import ring
from commrt.algorithms.arguments import require_step_and_ranks, require_whole
from commrt.algorithms.parts import two_levels
from commrt.errors import UsageError
from commrt.schedule import MIX, IntArray, Schedule, Step, empty

Topology = Literal["dissemination", "hypercube"]
Payload = Literal["weights", "gradients"]

WEIGHT = 0.5
LATE_WEIGHT = 0.25
"""Weight of a message that arrives a step late. With 1/2, two ranks would oscillate for ever."""


def period(p: int) -> int:
    """Return the steps until each rank's value has reached all: ``ceil(log2 p)``, 1 for one rank.

    >>> [period(p) for p in (1, 2, 3, 4, 5, 100)]
    [1, 1, 2, 2, 3, 7]
    """
    return (p - 1).bit_length() or 1


@lru_cache
def dissemination(p: int, k: int, weight: float = WEIGHT) -> Schedule:
    """Send from rank r to rank ``r + 2^k``, modulo p; any p.

    Cost: 1 step; the whole buffer sent per rank.

    >>> print(dissemination(3, 0))
    dissemination 0: 3 ranks, 1 chunk
      0  mix(0.5)  0->1 [0:1)  1->2 [0:1)  2->0 [0:1)
    """
    rank = np.arange(p)
    step = Step.of(src=rank, dst=(rank + (1 << k)) % p, lo=0, hi=1, combine=MIX, weight=weight)
    return Schedule(f"dissemination {k}", p, 1, lambda: iter([step]))


@lru_cache
def hypercube(p: int, k: int, weight: float = WEIGHT) -> Schedule:
    """Exchange between ranks whose numbers differ in bit k; p is a power of two.

    Cost: 1 step; the whole buffer sent per rank. Raises `UsageError` for another p, as some ranks
    would have no partner in some steps.
    """
    if p & (p - 1):
        raise UsageError(
            f"a hypercube of {p} ranks would leave some ranks without a partner: use the topology"
            " 'dissemination', which takes any number of ranks"
        )
    rank = np.arange(p)
    step = Step.of(src=rank, dst=rank ^ (1 << k), lo=0, hi=1, combine=MIX, weight=weight)
    return Schedule(f"hypercube {k}", p, 1, lambda: iter([step]))


@lru_cache
def permutation(p: int, number: int, seed: int) -> IntArray:
    """Return the permutation of ranks in period `number`: entry i takes the part of rank i.

    Period 0 has the identity. It is the same on every machine, and does not touch the global random
    number generators.
    """
    if number == 0:
        return np.arange(p)
    # documented never to change
    keys = np.random.SeedSequence([seed, number]).generate_state(p, np.uint64)
    return np.argsort(keys, kind="stable")


ROUNDS = {"dissemination": dissemination, "hypercube": hypercube}


@dataclass(frozen=True, slots=True)
class Gossip:
    """Exchange with one partner per step, by a schedule that mixes.

    `topology` "dissemination" takes any rank count, "hypercube" powers of two.

    `rotate` permutes the ranks after each period, so that all meet; the permutation depends on
    `seed`.

    `payload` is what is exchanged. "weights", after the optimizer's step, keeps replicas together.
    "gradients", before it, is what the paper's abstract says. Then nothing pulls the replicas
    together, and they drift apart: use it for comparison, or call `Replica.consolidate` from time
    to time.

    `staleness` 1 mixes with the message of the step *before*, so that no rank waits for a slow
    partner; for weights only. `weight` is the share of the received value: by default 1/2, or 1/4
    if it is late (more oscillates).

    `within` is the number of ranks in a row, such as those of one node that share its network port.
    A row averages first. Then each rank gossips with other rows for its share of the buffer, so a
    row sends each byte once.
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
            raise UsageError(
                f"staleness={self.staleness!r:.80}: messages may be 0 or 1 step late; two diverge"
            )
        if self.staleness and self.payload == "gradients":
            raise UsageError(
                "staleness=1 is for payload='weights': a late gradient belongs to weights that are"
                " gone"
            )
        require_whole("seed", self.seed, 0)
        require_whole("within", self.within)
        if isinstance(self.weight, bool) or not isinstance(self.share, int | float):
            raise UsageError(f"weight={self.weight!r:.80}: give a number, or None for the default")
        if not 0 < self.share <= WEIGHT or (self.staleness and self.share >= WEIGHT):
            most = (
                "below 1/2, as late messages with 1/2 oscillate for ever"
                if self.staleness
                else "at most 1/2"
            )
            raise UsageError(
                f"weight={self.weight:g}: the share of what is received must be above 0 and {most}"
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Return what `commrt.options` calls this algorithm."""
        return ("gossip", f"gossip of {self.payload}", *["rows"] * (self.within > 1))

    @property
    def trained_by(self) -> str:
        """Return the module whose ``attach`` trains so: with gradients, the synchronous one."""
        return "commrt.gossip.gossip_replica" if self.payload == "weights" else SYNCHRONOUS

    @property
    def mixing_row(self) -> int:
        """Return how many ranks average exactly before rows mix: replicas do not become equal."""
        return self.within

    @property
    def share(self) -> float:
        """Weight of the received value."""
        return (
            self.weight if self.weight is not None else (LATE_WEIGHT if self.staleness else WEIGHT)
        )

    def period(self, ranks: int) -> int:
        """Return the number of steps after which the ranks are permuted."""
        return period(self._rows(ranks))

    def among(self, ranks: int) -> Gossip:
        """Return this algorithm, or the most similar one for `ranks` ranks, after ranks were lost.

        >>> Gossip("hypercube").among(7).topology, Gossip(within=4).among(6).within
        ('dissemination', 1)
        """
        within = self.within if ranks % self.within == 0 else 1
        rows = ranks // within
        return replace(
            self, within=within, topology="dissemination" if rows & (rows - 1) else self.topology
        )

    def schedule(self, step: int, ranks: int) -> Schedule:
        """Return the exchange of `step`. It sums over `within` ranks, so divide the result by that.

        Raises `UsageError` if `within` does not divide `ranks`, or the topology does not take so
        many rows.
        """
        require_step_and_ranks(step, ranks)
        rows = self._rows(ranks)
        number, place = divmod(step, period(rows))
        unpermuted = _round(self.topology, rows, place, self.share, self.within)
        return _schedule(unpermuted, rows, self.within, number if self.rotate else 0, self.seed)

    def _rows(self, ranks: int) -> int:
        if ranks % self.within:
            raise UsageError(
                f"within={self.within} does not divide {ranks} ranks: all rows must have one"
                " length, so use a divisor"
            )
        return ranks // self.within


@lru_cache
def _schedule(unpermuted: Schedule, rows: int, within: int, number: int, seed: int) -> Schedule:
    """Return one object for equal arguments, as proofs and programs are cached by it."""
    return unpermuted.renamed(_order(rows, within, number, seed))


@lru_cache
def _order(rows: int, within: int, number: int, seed: int) -> IntArray:
    """Return the ranks of each row, where rows are permuted."""
    return (permutation(rows, number, seed)[:, None] * within + np.arange(within)).ravel()


@lru_cache
def _round(topology: str, rows: int, k: int, share: float, within: int) -> Schedule:
    across = ROUNDS[topology](rows, k, share) if rows > 1 else empty(1)
    if within == 1:
        return across
    name = f"{across.name} of rows of {within}"
    return two_levels(ring.reduce_scatter(within), across, ring.all_gather(within), name)


def _require_one_of(what: str, given: str, offered: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in offered:
        raise UsageError(f"{what}={given!r:.80}: choose one of {', '.join(offered)}")
