# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce, and in what pieces, is soonest over on a cluster: all that could be run is priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np

from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.ring import Ring
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.simulate import Pricing
from commrt.pricing.timeline import overlapped_step
from commrt.pricing.workload import GRADIENT_NBYTES, Workload
from commrt.schedule import Algorithm

__all__ = ["CAPS_MB", "ITEM_NBYTES", "Plan", "Waiting", "algorithms", "backed_plans", "exchange_plans", "step_plans"]

ITEM_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""By what travels."""
CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
"""Buckets that are tried."""
TRIED_IN_STEPS = 4
"""Algorithms, those that exchange the whole soonest; besides the one of least latency, which small buckets may favour,
and the ring, for comparison."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to average gradients."""

    algorithm: Algorithm
    nbytes: float
    """Of all gradients."""
    exchange_s: float
    """Of all of them at once."""
    latency_s: float
    """What of it does not depend on how many there are."""
    steps: int
    wire: str | None = None
    bucket_cap_mb: float | None = None
    step_s: float | None = None
    """Of training."""
    compute_s: float | None = None
    """Of it, where no rank is slow."""
    backups: int = 0
    updates: float = 1.0
    """That training needs, compared with waiting for all."""

    @property
    def seconds(self) -> float:
        """What it is ranked by: to get as far as with an update of all ranks."""
        return self.exchange_s if self.step_s is None else self.step_s * self.updates

    @property
    def efficiency(self) -> float | None:
        """Of the step."""
        return None if self.step_s is None or self.compute_s is None else self.compute_s / self.step_s

    @property
    def name(self) -> str:
        """Of the algorithm: the shortest call that makes it."""
        algorithm = self.algorithm
        if not isinstance(algorithm, Torus2D):
            return str(algorithm)
        given = [] if algorithm.grid is None else [f"grid={algorithm.grid}"]
        return f"Torus2D({', '.join([*given, *['both_ways=True'] * algorithm.both_ways])})"

    @property
    def python(self) -> str:
        """What builds it."""
        algorithm = f"commrt.{self.name}"
        given = [f"commrt.BackupWorkers({self.backups}, {algorithm})" if self.backups else algorithm]
        given += [] if self.wire in {None, "fp32"} else [f"wire=torch.{_DTYPES[self.wire or '']}"]
        given += [] if self.bucket_cap_mb is None else [f"bucket_cap_mb={self.bucket_cap_mb:g}"]
        return f"commrt.attach(model, optimizer, {', '.join(given)})"


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def algorithms(ranks: int) -> Iterator[Algorithm]:
    """All-reduces that so many ranks can play, each shape once.

    >>> [str(each) for each in algorithms(2)]
    ['Ring()', 'HalvingDoubling()']
    """
    yield Ring()
    yield HalvingDoubling()
    sides = [side for side in range(2, ranks // 2 + 1) if ranks % side == 0]
    grids = [(side, ranks // side) for side in sides]
    if not grids and ranks > 3:
        yield Torus2D()  # of a prime, one rank is folded in
    for grid in grids:
        yield Torus2D(grid)
        yield Torus2D(grid, both_ways=True)


class Waiting(NamedTuple):
    """What slow ranks make of a step that does not wait for some."""

    backups: int
    slower: float
    """How many times as long a step computes as a rank that nothing holds up."""
    updates: float
    """That training needs, compared with waiting for all."""


class _Candidate(NamedTuple):
    algorithm: Algorithm
    pricing: Pricing

    def plan(self, nbytes: float) -> Plan:
        """To exchange so much at once."""
        price, latency = self.pricing.price(nbytes), self.pricing.price(0.0)
        return Plan(self.algorithm, nbytes, price.seconds, latency.seconds, price.steps)


def _candidates(cluster: Cluster, ranks: int) -> list[_Candidate]:
    return [_Candidate(each, Pricing(each.schedule(0, ranks), cluster)) for each in algorithms(ranks)]


def _soonest(candidates: Sequence[_Candidate], nbytes: float) -> list[_Candidate]:
    """Those to be tried in steps."""
    return sorted(candidates, key=lambda each: _merit(each.plan(nbytes)))[:TRIED_IN_STEPS]


def _merit(plan: Plan) -> tuple[float, float, int]:
    """To the nanosecond: what is no better for less than that is as good."""
    return round(plan.seconds, 9), round(plan.exchange_s, 9), plan.steps


def exchange_plans(cluster: Cluster, ranks: int, nbytes: float) -> list[Plan]:
    """Of `nbytes` at once, the soonest over first; of equals the one with fewer steps."""
    return sorted((each.plan(nbytes) for each in _candidates(cluster, ranks)), key=_merit)


def step_plans(
    cluster: Cluster,
    ranks: int,
    workload: Workload,
    compute_s: float,
    wires: Sequence[str] = ("fp32", "bf16"),
    caps_mb: Sequence[float] = CAPS_MB,
) -> list[Plan]:
    """Of a training step that computes for `compute_s`: each algorithm and wire with its best buckets, best first."""
    if compute_s <= 0:
        raise UsageError(f"a step that computes for {compute_s:g} s: give a time above 0")
    candidates, found = _candidates(cluster, ranks), list[Plan]()
    for wire in wires:
        nbytes = float(workload.numel * ITEM_NBYTES[wire])
        soonest = _soonest(candidates, nbytes)
        fewest = min(candidates, key=lambda each: each.plan(0.0).exchange_s)
        tried = {each.algorithm: each for each in (*soonest, fewest, candidates[0])}
        for each in tried.values():
            each.pricing.straighten(nbytes)
        found += [_in_a_step(each, workload, compute_s, wire, caps_mb) for each in tried.values()]
    return sorted(found, key=_merit)


def backed_plans(
    cluster: Cluster,
    ranks: int,
    workload: Workload,
    compute_s: float,
    wires: Sequence[str],
    waitings: Sequence[Waiting],
) -> list[Plan]:
    """Of a training step of ranks that are slow at times, with as many backups as each of `waitings`; best first.

    Backup workers announce their gradients after the backward pass, so nothing of their exchange is hidden.
    """
    found = list[Plan]()
    for waiting in waitings:
        if waiting.backups:
            plans = _quorum_plans(cluster, ranks - waiting.backups, ranks, workload, compute_s, wires)
        else:
            plans = step_plans(cluster, ranks, workload, compute_s, wires)
        found += [_slowed(plan, waiting) for plan in plans]
    return sorted(found, key=_merit)


def _slowed(plan: Plan, waiting: Waiting) -> Plan:
    longer_s = (waiting.slower - 1) * (plan.compute_s or 0.0)
    return replace(plan, step_s=(plan.step_s or 0.0) + longer_s, backups=waiting.backups, updates=waiting.updates)


def _quorum_plans(
    cluster: Cluster, needed: int, ranks: int, workload: Workload, compute_s: float, wires: Sequence[str]
) -> list[Plan]:
    """Those who count are any `needed` of all ranks, which seldom fill nodes."""
    quorum = np.sort(np.random.default_rng(0).permutation(ranks)[:needed])
    schedules = ((each, each.schedule(0, needed).over(quorum, ranks)) for each in algorithms(needed))
    candidates = [_Candidate(each, Pricing(schedule, cluster)) for each, schedule in schedules]
    found = list[Plan]()
    for wire in wires:
        nbytes = float(workload.numel * ITEM_NBYTES[wire])
        soonest = _soonest(candidates, nbytes)
        for candidate in dict.fromkeys((*soonest, candidates[0])):
            cap_mb = ceil(workload.numel * GRADIENT_NBYTES / 2**20)
            buckets = [each._replace(at=1.0) for each in workload.buckets(cap_mb * 2**20, ITEM_NBYTES[wire])]
            step_s = overlapped_step(candidate.pricing, buckets, compute_s).seconds
            whole = candidate.plan(nbytes)
            found.append(replace(whole, wire=wire, bucket_cap_mb=cap_mb, step_s=step_s, compute_s=compute_s))
    return found


def _in_a_step(
    candidate: _Candidate, workload: Workload, compute_s: float, wire: str, caps_mb: Sequence[float]
) -> Plan:
    itemsize = ITEM_NBYTES[wire]

    def step_s(cap_mb: float) -> float:
        buckets = workload.buckets(cap_mb * 2**20, itemsize)
        return round(overlapped_step(candidate.pricing, buckets, compute_s).seconds, 9)

    best = min(sorted(caps_mb, reverse=True), key=step_s)  # of equals the largest
    whole = candidate.plan(float(workload.numel * itemsize))
    return replace(whole, wire=wire, bucket_cap_mb=best, step_s=step_s(best), compute_s=compute_s)
