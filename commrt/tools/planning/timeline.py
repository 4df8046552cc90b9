# SPDX-License-Identifier: Apache-2.0
"""Timelines of simulated steps: how much exchange the backward pass hides, and how delays spread.

In an all-reduce every rank waits for the slowest. In gossip a rank waits for one other, which
waited for one other in the step before. So delays spread slowly, and mostly pass before they meet.
Pure functions of times. Recorded timelines are read by `pictures.timelines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.pricing.price import Seconds
from commrt.tools.planning.computing_times import Times
from commrt.tools.planning.wires import WirePricing
from commrt.tools.planning.workload import ReadyBucket


class BucketTimes(NamedTuple):
    """The exchange of one bucket; times are [ranks]."""

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
        times.append(BucketTimes(ready_s, ready_s + pack_s, exchanged_s, free_s))
    return StepTime(begin_s, begin_s + compute_s, tuple(times))


def blocking_step(pricing: WirePricing, nbytes: float, compute_s: ArrayLike) -> StepTime:
    """Return a step whose gradients leave together, after the backward pass."""
    return overlapped_step(pricing, [ReadyBucket(nbytes, 1.0)], compute_s)


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


def _per_rank(values: ArrayLike, pricing: WirePricing) -> Seconds:
    return np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), pricing.schedule.ranks))
