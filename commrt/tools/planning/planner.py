# SPDX-License-Identifier: Apache-2.0
"""Plans: which all-reduce, with which wire and buckets, ends soonest on a cluster.

All candidates are priced; nothing runs or is proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from commrt.algorithm import Algorithm
from commrt.algorithms.catalogue import REGISTERED
from commrt.algorithms.direct import MOST_RANKS, Direct
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.registration import Nodes, Shape
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.quantizer import QUANTIZERS, Quantizer
from commrt.tools.planning.bounds import all_reduce_bound_s
from commrt.tools.planning.python_calls import PYTHON_WIRES, python_call, short_name
from commrt.tools.planning.stragglers import BackupCost
from commrt.tools.planning.timeline import overlapped_step
from commrt.tools.planning.wires import GRADIENT_NBYTES, ITEMS, WirePricing, wire_nbytes
from commrt.tools.planning.workload import Workload

CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
"""Bucket sizes that are tried."""
FEW_CAPS_MB = (8.0, 100.0)
MOST_FOR_ALL_CAPS = 4096
"""Those tried on more ranks than this, where pricing a bucket takes a tenth of a second."""
MOST_STEPS = 2048
"""Most steps of a shape that is tried on so many ranks."""
TRIED_IN_STEPS = 4
"""Algorithms tried in a training step: those that exchange all gradients soonest.

Besides these, the one of least latency, which may suit small buckets, and the first candidate,
which is the ring if that was priced. On more than `MOST_FOR_ALL_CAPS` ranks only the best one.
"""
WORTH = 0.01
"""Share of a step that another wire than the gradients' must save: it rounds them."""
OWN_WIRE = "fp32"


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to average gradients, and its price.

    Buckets and times of a step are None in a plan of an exchange alone, and so is a wire of values.
    """

    algorithm: Algorithm
    nbytes: float
    """Bytes of all gradients."""
    exchange_s: float
    """Time to exchange all gradients at once."""
    latency_s: float
    """The part of it that does not depend on the number of bytes."""
    steps: int
    """Steps of the schedule."""
    wire: str | None = None
    bucket_cap_mb: float | None = None
    step_s: float | None = None
    """Time of a training step."""
    compute_s: float | None = None
    """The part of it that is computing, if no rank is slow."""
    backups: int = 0
    updates: float = 1.0
    """Updates that training needs, relative to waiting for all ranks."""

    @property
    def seconds(self) -> float:
        """The time that plans are ranked by: of the exchange, or of steps for one full update."""
        return self.exchange_s if self.step_s is None else self.step_s * self.updates

    @property
    def efficiency(self) -> float | None:
        """Time of computing divided by the time of the step."""
        return (
            None if self.step_s is None or self.compute_s is None else self.compute_s / self.step_s
        )

    @property
    def name(self) -> str:
        """The shortest call that makes the algorithm."""
        return short_name(self.algorithm)

    @property
    def python(self) -> str:
        """The call of `commrt.attach` that uses this plan."""
        algorithm = python_call(self.algorithm)
        given = [
            f"commrt.BackupWorkers({self.backups}, {algorithm})" if self.backups else algorithm
        ]
        given += [f"wire={PYTHON_WIRES[self.wire]}"] if self.wire in PYTHON_WIRES else []
        given += [] if self.bucket_cap_mb is None else [f"bucket_cap_mb={self.bucket_cap_mb:g}"]
        return f"commrt.attach(model, optimizer, {', '.join(given)})"

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """The better plan has the smaller key.

        Times are in nanoseconds; ties go to the plan with fewer steps.
        """
        return round(1e9 * self.seconds), round(1e9 * self.exchange_s), self.steps


def tried_shapes(nodes: Nodes) -> Iterator[Shape]:
    """Yield the all-reduces to try on `nodes`, each once, the ring or the rings first.

    >>> [str(each.algorithm) for each in tried_shapes(Nodes(2))][:3]
    ['Ring()', 'HalvingDoubling()', 'DoubleTree(within=1, slices=4)']
    >>> str(next(tried_shapes(Nodes(16, per_node=8, cards=4))).algorithm)
    'Rings(count=4, per_node=8)'
    """
    return (shape for each in REGISTERED for shape in each.shapes(nodes))


def coded_candidates(ranks: int, per_node: int = 1) -> Iterator[Algorithm]:
    """Yield all-reduces for codes between `ranks` ranks, `per_node` in a node; raises `UsageError`.

    >>> [str(each) for each in coded_candidates(8, per_node=4)]
    ['Direct(within=1)', 'Direct(within=4)']
    >>> [str(each) for each in coded_candidates(4096, per_node=8)]
    ['Direct(within=8)']
    """
    if ranks <= MOST_RANKS:
        yield Direct()
    if (
        1 < per_node < ranks
        and ranks % per_node == 0
        and max(per_node, ranks // per_node) <= MOST_RANKS
    ):
        yield Direct(per_node)
    elif ranks > MOST_RANKS:
        raise UsageError(
            f"no schedule carries codes between {ranks:,} ranks: direct takes up to {MOST_RANKS:,}"
            " at once"
        )


class Candidate(NamedTuple):
    """An all-reduce that may be the best one."""

    algorithm: Algorithm
    pricing: WirePricing

    def plan(self, nbytes: float) -> Plan:
        """Return the plan to exchange `nbytes` at once."""
        price = self.pricing.price(nbytes)
        latency = self.pricing.price(0.0)
        return Plan(self.algorithm, nbytes, price.seconds, latency.seconds, price.steps)


def priced_candidates(
    cluster: Cluster,
    ranks: int,
    nbytes: float,
    backups: int = 0,
    quantizer: Quantizer | None = None,
) -> list[Candidate]:
    """Return what may run on `ranks` ranks less `backups` random ones; the rest seldom fills nodes.

    A shape of many steps is left out if it takes longer than `HalvingDoubling`, even if it moved
    `nbytes` as fast as the cluster allows: it would take long to price.
    """
    needed = ranks - backups
    members = np.sort(np.random.default_rng(0).permutation(ranks)[:needed])
    per_node = 1 if backups else cluster.gpus_per_node

    def candidate(algorithm: Algorithm) -> Candidate:
        schedule = algorithm.schedule(0, needed)
        return Candidate(
            algorithm,
            WirePricing(schedule.over(members, ranks) if backups else schedule, cluster, quantizer),
        )

    if quantizer is not None:
        return [candidate(each) for each in coded_candidates(needed, per_node)]
    halving = candidate(HalvingDoubling())
    limit_s = halving.plan(nbytes).exchange_s
    bound_s = all_reduce_bound_s(cluster, needed, nbytes)
    latency_s = 1e-6 * min(cluster.within.latency_us, cluster.between.latency_us)
    most_steps = MOST_STEPS if needed > MOST_FOR_ALL_CAPS else inf
    found = []
    for algorithm, steps in tried_shapes(Nodes(needed, per_node, cluster.ring_count)):
        if steps and (steps > most_steps or bound_s + latency_s * (steps - 1) > limit_s):
            continue
        found.append(halving if algorithm == halving.algorithm else candidate(algorithm))
    return found


def exchange_plans(
    cluster: Cluster, ranks: int, nbytes: float, wire: str | None = None
) -> list[Plan]:
    """Return the plans to exchange `nbytes` at once, best first; `wire` names codes, if any."""
    quantizer = QUANTIZERS.get(wire or "")
    plans = (
        each.plan(nbytes) for each in priced_candidates(cluster, ranks, nbytes, quantizer=quantizer)
    )
    return sorted((replace(plan, wire=wire) for plan in plans), key=lambda plan: plan.sort_key)


def step_plans(
    cluster: Cluster,
    ranks: int,
    workload: Workload,
    compute_s: float,
    wires: Sequence[str] = ("fp32", "bf16"),
    costs: Sequence[BackupCost] = (BackupCost(),),
) -> list[Plan]:
    """Return the plans of a training step that computes for `compute_s`, the best first.

    There is one for each of `costs`, algorithm and wire, with its best bucket size. Without
    backups, the exchange overlaps the backward pass. Backup workers announce their gradients after
    it, so none of their exchange is hidden.
    """
    if compute_s <= 0:
        raise UsageError(f"a step that computes for {compute_s:g} s: give a time above 0")
    found = list[Plan]()
    for cost in costs:
        largest = float(workload.numel * GRADIENT_NBYTES)
        quantizers = dict.fromkeys(QUANTIZERS.get(wire) for wire in wires)
        priced = {
            quantizer: priced_candidates(cluster, ranks, largest, cost.backups, quantizer)
            for quantizer in quantizers
        }
        for wire in wires:
            nbytes = wire_nbytes(workload.numel, ITEMS[wire])
            for candidate in tried_in_steps(priced[QUANTIZERS.get(wire)], nbytes):
                plan = _step_plan(candidate, workload, compute_s, wire, overlaps=not cost.backups)
                step_s = (plan.step_s or 0.0) + (cost.slower - 1) * compute_s
                plan = replace(plan, backups=cost.backups, updates=cost.updates)
                found.append(replace(plan, step_s=step_s))
    plans = sorted(found, key=lambda plan: plan.sort_key)
    enough_s = (1 + WORTH) * plans[0].seconds
    own = [plan for plan in plans if plan.wire == OWN_WIRE and plan.seconds <= enough_s][:1]
    return [*own, *(plan for plan in plans if plan not in own)]


def tried_in_steps(candidates: Sequence[Candidate], nbytes: float) -> list[Candidate]:
    """Return those `candidates` that are worth pricing in a step that exchanges `nbytes`."""
    most = TRIED_IN_STEPS if candidates[0].pricing.schedule.ranks <= MOST_FOR_ALL_CAPS else 1
    soonest = sorted(candidates, key=lambda each: each.plan(nbytes).sort_key)[:most]
    least_latency = min(candidates, key=lambda each: each.pricing.price(0.0).seconds)
    return list(
        {each.algorithm: each for each in (*soonest, least_latency, candidates[0])}.values()
    )


def _step_plan(
    candidate: Candidate, workload: Workload, compute_s: float, wire: str, *, overlaps: bool
) -> Plan:
    """Return the plan with the best bucket size, of equal ones the largest."""

    def step_s(cap_mb: float) -> float:
        buckets = workload.buckets(cap_mb * 2**20, ITEMS[wire])
        ready = buckets if overlaps else [each._replace(at=1.0) for each in buckets]
        return round(overlapped_step(candidate.pricing, ready, compute_s).seconds, 9)

    caps_mb: tuple[float, ...] = CAPS_MB
    if not overlaps:
        caps_mb = (ceil(workload.numel * GRADIENT_NBYTES / 2**20),)
    elif candidate.pricing.schedule.ranks > MOST_FOR_ALL_CAPS:
        caps_mb = FEW_CAPS_MB
    times_s = {cap_mb: step_s(cap_mb) for cap_mb in sorted(caps_mb, reverse=True)}
    best = min(times_s, key=times_s.__getitem__)
    plan = candidate.plan(wire_nbytes(workload.numel, ITEMS[wire]))
    return replace(plan, wire=wire, bucket_cap_mb=best, step_s=times_s[best], compute_s=compute_s)
