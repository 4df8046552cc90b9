# SPDX-License-Identifier: Apache-2.0
"""A training step whose parameters are sharded, as in FSDP: gather a unit, compute, scatter its gradients.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
stage 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

from commrt.algorithm import Algorithm
from commrt.algorithms.direct import Direct
from commrt.algorithms.double_tree import DoubleTree
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Pricing
from commrt.schedule import ADD, COPY, Schedule
from commrt.tools.planning.planner import priced_candidates, tried_in_steps
from commrt.tools.planning.wires import GRADIENT_NBYTES
from commrt.tools.planning.workload import FORWARD, Workload

__all__ = ["Halves", "ShardedStep", "Unit", "halves_of", "sharded_step", "sharding_candidates", "units_of"]

FEW_RANKS = 256
"""Up to which `Direct` is tried: its price takes time and memory as ranks squared."""


class Unit(NamedTuple):
    """Layers whose parameters are gathered together."""

    numel: int
    share: float
    """Part of a pass's computing."""


def units_of(workload: Workload, cap_mb: float) -> list[Unit]:
    """Return the units of a model: consecutive layers, each unit as many as fill `cap_mb` MiB of fp32 parameters.

    >>> [unit.numel for unit in units_of(Workload.even(4 << 20, parts=8), cap_mb=6.0)]
    [1572864, 1572864, 1048576]
    """
    if not cap_mb > 0:
        raise UsageError(f"units of {cap_mb:g} MB: give a size above 0")
    found, numel, work = list[Unit](), 0, 0.0
    for layer in workload.layers:
        numel, work = numel + layer.numel, work + layer.work
        if numel * GRADIENT_NBYTES >= cap_mb * 2**20:
            found.append(Unit(numel, work / workload.work))
            numel, work = 0, 0.0
    return [*found, Unit(numel, work / workload.work)] if numel else found


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """An all-reduce as its two halves, each of which is a collective of its own."""

    algorithm: Algorithm
    reduce_scatter: Pricing
    all_gather: Pricing


def halves_of(schedule: Schedule) -> tuple[Schedule, Schedule] | None:
    """Return the reduce-scatter and the all-gather that `schedule` consists of; None if it is made otherwise.

    Which chunks a rank holds in between is up to the schedule.

    >>> from commrt.algorithms import ring
    >>> scatter, gather = halves_of(ring.all_reduce(3))
    >>> print(gather)
    all-gather of ring: 3 ranks, 3 chunks
      0  copy  0->1 [0:1)  1->2 [1:2)  2->0 [2:3)
      1  copy  0->1 [2:3)  1->2 [0:1)  2->0 [1:2)
    """
    kinds = [{*step.combine.tolist()} for step in schedule.checked_steps()]
    adding = kinds.count({ADD})
    if kinds != [{ADD}] * adding + [{COPY}] * (len(kinds) - adding) or schedule.chunks % schedule.ranks:
        return None
    return (
        Schedule(f"reduce-scatter of {schedule.name}", schedule.ranks, schedule.chunks,
                 lambda: islice(schedule.steps(), adding)),
        Schedule(f"all-gather of {schedule.name}", schedule.ranks, schedule.chunks,
                 lambda: islice(schedule.steps(), adding, None)),
    )  # fmt: skip


def sharding_candidates(cluster: Cluster, ranks: int, nbytes: float) -> Iterator[Halves]:
    """Yield the all-reduces worth trying for `nbytes` whose halves leave each rank an equal share.

    Trees do not: one rank gets all. `Direct` is tried on few ranks.
    """
    priced = priced_candidates(cluster, ranks, nbytes)
    tried = tried_in_steps([each for each in priced if not isinstance(each.algorithm, DoubleTree)], nbytes)
    for algorithm in [*(each.algorithm for each in tried), *[Direct()] * (ranks <= FEW_RANKS)]:
        if (found := halves_of(algorithm.schedule(0, ranks))) is not None:
            yield Halves(algorithm, *(Pricing(half, cluster) for half in found))


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """The times of one training step, of ranks that are equally fast."""

    seconds: float
    compute_s: float
    exchange_s: float
    """Time of all gathers and scatters, one after the other."""

    @property
    def exposed_s(self) -> float:
        """Time in which the ranks do not compute."""
        return self.seconds - self.compute_s

    @property
    def efficiency(self) -> float:
        """Time of computing divided by the time of the step."""
        return self.compute_s / self.seconds


class _Turn(NamedTuple):
    """A unit's part of a pass."""

    gather_s: float
    compute_s: float
    scatter_s: float = 0.0


def sharded_step(units: Sequence[Unit], halves: Halves, compute_s: float, itemsize: int) -> ShardedStep:
    """Return a step that gathers each unit before its forward and its backward pass, and then scatters its gradients.

    One exchange runs at a time. A rank holds at most two units: the one that it computes, and the next. The last one
    stays gathered from its forward to its backward pass. Parameters and gradients travel in `itemsize` bytes.
    """

    @cache
    def seconds(pricing: Pricing, numel: int) -> float:
        return pricing.price(float(numel * itemsize)).seconds

    gathers_s = [seconds(halves.all_gather, unit.numel) for unit in units]
    forward = [_Turn(s, FORWARD * compute_s * unit.share) for s, unit in zip(gathers_s, units, strict=True)]
    backward = [
        _Turn(s, (1 - FORWARD) * compute_s * unit.share, seconds(halves.reduce_scatter, unit.numel))
        for s, unit in zip([*gathers_s[:-1], 0.0], units, strict=True)
    ]
    turns = [*forward, *reversed(backward)]
    return ShardedStep(_end_s(turns), compute_s, sum(turn.gather_s + turn.scatter_s for turn in turns))


def _end_s(turns: Sequence[_Turn]) -> float:
    """Return when the last turn and the last exchange have ended."""
    lane_s = computed_s = 0.0
    held = deque([(0.0, 0.0)] * 2)  # units still in memory: end of computing, and time of the scatter that follows it
    for turn in turns:
        freed_s, scatter_s = held.popleft()
        lane_s = max(lane_s, freed_s) + scatter_s + turn.gather_s
        computed_s = max(computed_s, lane_s if turn.gather_s else 0.0) + turn.compute_s
        held.append((computed_s, turn.scatter_s))
    for freed_s, scatter_s in held:
        lane_s = max(lane_s, freed_s) + scatter_s
    return max(lane_s, computed_s)
