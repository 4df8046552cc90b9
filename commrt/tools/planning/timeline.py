# SPDX-License-Identifier: Apache-2.0
"""Simulated training steps: how much exchange the backward pass hides, and how delays spread.

In an all-reduce every rank waits for the slowest. In gossip a rank waits for one other, which
waited for one other in the step before. So delays spread slowly, and mostly pass before they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Seconds
from commrt.tools.planning.computing_times import Times
from commrt.tools.planning.wires import WirePricing
from commrt.tools.planning.workload import ReadyBucket

ROUNDING = 1e-9
"""Relative rounding error of a quotient of two times."""


class BucketTimes(NamedTuple):
    """The exchange of one bucket; times are [ranks]."""

    nbytes: float
    begin_s: Seconds
    """The bucket's gradients are ready, and the exchange before has ended."""
    packed_s: Seconds
    exchanged_s: Seconds
    end_s: Seconds
    """The bucket is unpacked."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """The times of one training step, in seconds; arrays are [ranks]."""

    begin_s: Seconds
    computed_s: Seconds
    """End of the backward pass."""
    buckets: tuple[BucketTimes, ...]

    @property
    def end_s(self) -> Seconds:
        """Time at which each rank can use its gradients."""
        return (
            np.maximum(self.computed_s, self.buckets[-1].end_s) if self.buckets else self.computed_s
        )

    @property
    def seconds(self) -> float:
        """End of the last rank."""
        return float(self.end_s.max())

    @property
    def exposed_s(self) -> float:
        """Time that the last rank waits after its backward pass."""
        return float((self.end_s - self.computed_s)[self.end_s.argmax()])

    @property
    def efficiency(self) -> float:
        """Mean time of computing divided by the time of the step."""
        return float((self.computed_s - self.begin_s).mean() / (self.end_s - self.begin_s).mean())


class Phase(NamedTuple):
    """Consecutive steps of a schedule in which the same ranks send each other the same amounts."""

    steps: int
    adds: bool
    """True if what is received is added or mixed, False if it is copied."""
    begin_s: float
    end_s: float
    """Time at which the last rank has finished."""


def phases(pricing: WirePricing, nbytes: float) -> list[Phase]:
    """Return the phases of the schedule, for ranks that begin together."""
    begin_s = pricing.code_s(nbytes)
    chunk_nbytes = pricing.moved_nbytes(nbytes) / pricing.schedule.chunks
    found = list[Phase]()
    clock_s = np.full(pricing.schedule.ranks, begin_s)
    for pattern, times in pricing.runs:
        clock_s = pattern.play(clock_s, chunk_nbytes, times)
        found.append(Phase(times, pattern.adds, begin_s, float(clock_s.max())))
        begin_s = found[-1].end_s
    return found


def efficiency_at(cluster: Cluster, samples: int) -> float:
    """Return the share of full speed that kernels reach with so many samples per rank in a step.

    Between two entries of `kernel_efficiency` it is linear in log2 of the samples; beyond the ends,
    constant.

    >>> from commrt.pricing.cluster import Between, Link
    >>> efficiency = {4: 0.8, 64: 1.0}
    >>> cpus = Cluster("cpus", "", 1, Link(1, 1), Between(1, 1), kernel_efficiency=efficiency)
    >>> [round(efficiency_at(cpus, samples), 3) for samples in (1, 4, 16, 256)]
    [0.8, 0.8, 0.9, 1.0]
    """
    if samples < 1:
        raise UsageError(f"{samples} samples per rank: give at least 1")
    known = cluster.kernel_efficiency
    return (
        float(np.interp(log2(samples), [log2(each) for each in known], [*known.values()]))
        if known
        else 1.0
    )


def overlapped_step(
    pricing: WirePricing,
    buckets: Sequence[ReadyBucket],
    compute_s: ArrayLike,
    begin_s: ArrayLike = 0.0,
) -> StepTime:
    """Return a step whose buckets leave in turn, each as soon as its gradients are ready.

    `compute_s` and `begin_s` are [ranks], or one number for all.
    """
    begin_s, compute_s = (_per_rank(values, pricing) for values in (begin_s, compute_s))
    free_s = begin_s
    times = list[BucketTimes]()
    for bucket in buckets:
        ready_s = np.maximum(free_s, begin_s + bucket.at * compute_s)
        pack_s = pricing.pack_s(bucket.nbytes)
        exchanged_s = pricing.price(bucket.nbytes, ready_s + pack_s).finish_s
        free_s = exchanged_s + pack_s
        times.append(BucketTimes(bucket.nbytes, ready_s, ready_s + pack_s, exchanged_s, free_s))
    return StepTime(begin_s, begin_s + compute_s, tuple(times))


def blocking_step(
    pricing: WirePricing, nbytes: float, compute_s: ArrayLike, begin_s: ArrayLike = 0.0
) -> StepTime:
    """Return a step whose gradients leave together, after the backward pass."""
    return overlapped_step(pricing, [ReadyBucket(nbytes, 1.0)], compute_s, begin_s)


def mean_efficiency(pricing: WirePricing, buckets: Sequence[ReadyBucket], times_s: Times) -> float:
    """Return the mean computing time divided by that of a step, for overlapped steps in a row.

    `times_s` [steps, ranks] says how long each rank computes.
    """
    clock_s = _per_rank(0.0, pricing)
    for compute_s in times_s:
        clock_s = overlapped_step(pricing, buckets, compute_s, clock_s).end_s
    return float(times_s.mean() * len(times_s) / clock_s.mean())


def gossip_efficiency(times_s: Times, algorithm: Gossip, message_s: float = 0.0) -> float:
    """Return the mean computing time divided by that of a step, if ranks wait only for partners.

    A message leaves at the end of a step and takes `message_s`. With `staleness` 1 a rank waits for
    the message of the step before. `times_s` [steps, ranks] says how long each rank computes.
    """
    steps, ranks = times_s.shape
    if algorithm.within > 1:
        raise UsageError(f"{algorithm} exchanges in groups too: take one without `within`")
    clock_s = np.zeros(ranks)
    sent_s = [clock_s] * algorithm.staleness  # ends of the steps whose messages are still in flight
    for step in range(steps):
        done_s = clock_s + times_s[step]
        sent_s.append(done_s)
        sources = np.arange(ranks)
        for moved in algorithm.schedule(max(step - algorithm.staleness, 0), ranks).checked_steps():
            sources[moved.dst] = moved.src
        delay_s = np.where(sources == np.arange(ranks), 0.0, message_s)
        clock_s = np.maximum(done_s, sent_s.pop(0)[sources] + delay_s)
    return float(times_s.mean() * steps / clock_s.mean())


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Steps of equally fast ranks that average their weights once per period."""

    fragment_s: float
    """The exchange of one fragment, packed and unpacked."""
    compute_s: float
    """The computing of one step."""
    period: int
    fragments: int = 1
    """They leave one after the other, evenly over the period."""

    @classmethod
    def priced(
        cls, pricing: WirePricing, nbytes: float, compute_s: float, period: int, fragments: int = 1
    ) -> LocalSteps:
        """Return the steps of a model of `nbytes` on the wire, in equal fragments."""
        fragment_s = blocking_step(pricing, nbytes / fragments, 0.0).seconds
        return cls(fragment_s, compute_s, period, fragments)

    @property
    def exchange_s(self) -> float:
        """Time to exchange all fragments, one after the other."""
        return self.fragments * self.fragment_s

    def exposed_s(self, delay: int) -> float:
        """Return a step's mean wait, if an average is merged `delay` steps after weights left.

        Each fragment is hidden by `delay` steps, and all fragments of a period by its steps.
        """
        hidden_s = min(self.fragments * delay, self.period) * self.compute_s
        return max(self.exchange_s - hidden_s, 0.0) / self.period

    def step_s(self, delay: int) -> float:
        """Return the mean time of a step."""
        return self.compute_s + self.exposed_s(delay)

    @property
    def hiding_delay(self) -> int | None:
        """The smallest delay that hides the exchange; None if no delay within the period does.

        >>> LocalSteps(fragment_s=0.156, compute_s=0.1, period=16).hiding_delay
        2
        """
        if self.exchange_s > self.period * self.compute_s * (1 + ROUNDING):
            return None
        return ceil(self.fragment_s / self.compute_s * (1 - ROUNDING))


def hiding_period(steps: LocalSteps, most: int) -> LocalSteps | None:
    """Return `steps`, its period doubled until that hides the exchange; None if beyond `most`.

    >>> steps = LocalSteps(fragment_s=2.5, compute_s=0.1, period=16)
    >>> hiding_period(steps, 512).period, hiding_period(steps, 16)
    (32, None)
    """
    while steps.hiding_delay is None and 2 * steps.period <= most:
        steps = LocalSteps(steps.fragment_s, steps.compute_s, 2 * steps.period, steps.fragments)
    return None if steps.hiding_delay is None else steps


def _per_rank(values: ArrayLike, pricing: WirePricing) -> Seconds:
    return np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), pricing.schedule.ranks))
