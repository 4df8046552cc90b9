# SPDX-License-Identifier: Apache-2.0
"""A training step with its exchanges, on ranks that are not there: what hides in the backward pass, what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from commrt.pricing.simulate import Pricing, Seconds
from commrt.pricing.stragglers import Times
from commrt.pricing.workload import Ready

__all__ = ["Act", "StepTime", "blocking_step", "mean_efficiency", "overlapped_step"]


class Act(NamedTuple):
    """The exchange of one bucket."""

    nbytes: float
    begin_s: Seconds
    """[ranks]: its gradients are ready, and the exchange before is done."""
    packed_s: Seconds
    exchanged_s: Seconds
    end_s: Seconds
    """It is unpacked."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Of one step; seconds since the first rank began it."""

    begin_s: Seconds
    computed_s: Seconds
    """[ranks]: when each has finished its backward pass."""
    acts: tuple[Act, ...]

    @property
    def end_s(self) -> Seconds:
        """[ranks]: when each can use its gradients."""
        return np.maximum(self.computed_s, self.acts[-1].end_s) if self.acts else self.computed_s

    @property
    def seconds(self) -> float:
        """Of the last rank."""
        return float(self.end_s.max())

    @property
    def exposed_s(self) -> float:
        """What the last rank waits for after its backward pass."""
        return float((self.end_s - self.computed_s)[self.end_s.argmax()])

    @property
    def efficiency(self) -> float:
        """Mean time of computing over the time of the step."""
        return float((self.computed_s - self.begin_s).mean() / (self.end_s - self.begin_s).mean())


def overlapped_step(
    pricing: Pricing, buckets: Sequence[Ready], compute_s: ArrayLike, begin_s: ArrayLike = 0.0
) -> StepTime:
    """Buckets leave one after the other, each as soon as its gradients are ready; `compute_s` and `begin_s` [ranks]."""
    begin_s, compute_s = (_each(values, pricing) for values in (begin_s, compute_s))
    lane_s, acts = begin_s, list[Act]()
    for bucket in buckets:
        ready_s, pack_s = np.maximum(lane_s, begin_s + bucket.at * compute_s), pricing.cluster.pack_s(bucket.nbytes)
        exchanged_s = pricing.price(bucket.nbytes, ready_s + pack_s).finish_s
        lane_s = exchanged_s + pack_s
        acts.append(Act(bucket.nbytes, ready_s, ready_s + pack_s, exchanged_s, lane_s))
    return StepTime(begin_s, begin_s + compute_s, tuple(acts))


def mean_efficiency(pricing: Pricing, buckets: Sequence[Ready], times_s: Times) -> float:
    """Mean time of computing over that of a step, one `overlapped_step` after the other; `times_s` [steps, ranks]."""
    clock_s = _each(0.0, pricing)
    for compute_s in times_s:
        clock_s = overlapped_step(pricing, buckets, compute_s, clock_s).end_s
    return float(times_s.mean() * len(times_s) / clock_s.mean())


def blocking_step(pricing: Pricing, nbytes: float, compute_s: ArrayLike, begin_s: ArrayLike = 0.0) -> StepTime:
    """All gradients leave together, after the backward pass."""
    return overlapped_step(pricing, [Ready(nbytes, 1.0)], compute_s, begin_s)


def _each(values: ArrayLike, pricing: Pricing) -> Seconds:
    return np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), pricing.schedule.ranks))
