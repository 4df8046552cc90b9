# SPDX-License-Identifier: Apache-2.0
"""What an exchange and a training step take, for the options of a command, and as JSON.

`StepEstimate.of` reads the file that --model names. An exchange is priced when it is first asked
for, and kept; nothing is printed, and no torch needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.random import default_rng

from commrt.algorithm import Algorithm
from commrt.algorithms.gossip import Gossip
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Price
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.choosing import compute_of, workload_called
from commrt.tools.planning.bounds import all_reduce_bound_s, exchange_bound_s
from commrt.tools.planning.computing_times import Jitter
from commrt.tools.planning.python_calls import short_name
from commrt.tools.planning.timeline import (
    blocking_step,
    gossip_efficiency,
    mean_efficiency,
    overlapped_step,
)
from commrt.tools.planning.wires import ITEMS, WirePricing, require_carried, wire_nbytes
from commrt.tools.planning.workload import FORWARD, ReadyBucket, Workload


@dataclass(frozen=True)
class ExchangeEstimate:
    """The price of one algorithm for `nbytes` on the wire."""

    algorithm: Algorithm
    ranks: int
    cluster: Cluster
    nbytes: float
    wire: str

    @cached_property
    def pricing(self) -> WirePricing:
        """Return the first step's pricing; raises `UsageError` if that cannot carry the codes."""
        require_carried(self.algorithm, self.ranks, self.wire)
        return WirePricing(
            self.algorithm.schedule(0, self.ranks), self.cluster, QUANTIZERS.get(self.wire)
        )

    @cached_property
    def price(self) -> Price:
        """Return the price of all bytes at once.

        Partners of gossip change, so there it is the mean of two periods.
        """
        first = self.pricing.price(self.nbytes)
        if not isinstance(self.algorithm, Gossip):
            return first
        steps = range(1, 2 * self.algorithm.period(self.ranks))
        others = (
            WirePricing(self.algorithm.schedule(step, self.ranks), self.cluster) for step in steps
        )
        finish_s = [first.finish_s, *(other.price(self.nbytes).finish_s for other in others)]
        return Price(np.full(self.ranks, np.mean([each.max() for each in finish_s])), first.steps)

    def record(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        price = self.price
        bound = exchange_bound_s if isinstance(self.algorithm, Gossip) else all_reduce_bound_s
        bound_s = bound(self.cluster, self.ranks, self.nbytes)
        known: dict[str, Any] = {
            "algorithm": short_name(self.algorithm),
            "ranks": self.ranks,
            "cluster": self.cluster.name,
            "nbytes": self.nbytes,
            "seconds": price.seconds,
            "lower_bound_seconds": bound_s,
            "of_optimal": price.seconds / bound_s if bound_s else None,
            "steps": price.steps,
        }
        if self.pricing.quantizer is not None:
            known |= {"wire": self.wire, "coding_seconds": 2 * self.pricing.code_s(self.nbytes)}
        return known


@dataclass(frozen=True)
class StepEstimate:
    """The price of a training step with one algorithm."""

    exchange: ExchangeEstimate
    """Of all gradients at once, or of all weights."""
    workload: Workload
    compute_s: float
    rate: float | None = None
    """Images per second of a rank while it computes; None if that is not known."""
    bucket_cap_mb: float = 25.0

    @classmethod
    def of(cls, algorithm: Algorithm, options: opt.StepOptions, cluster: Cluster) -> Self:
        """Return the estimate for `options` on `cluster`; raises `UsageError`."""
        workload = workload_called(options.model)
        nbytes = wire_nbytes(workload.numel, ITEMS[options.wire])
        exchange = ExchangeEstimate(algorithm, options.ranks, cluster, nbytes, options.wire)
        computing = compute_of(workload, cluster, options.batch, options.compute_ms)
        return cls(exchange, workload, *computing, options.bucket_cap_mb)

    @cached_property
    def buckets(self) -> list[ReadyBucket]:
        """Return the buckets that leave during the backward pass."""
        return self.workload.buckets(self.bucket_cap_mb * 2**20, ITEMS[self.exchange.wire])

    def times_s(self) -> dict[str, float]:
        """Return the time of a step by when it exchanges."""
        exchange = self.exchange
        compute_s = self.compute_s
        if isinstance(exchange.algorithm, Gossip):  # of weights, which exist only after the step
            exchange_s = exchange.price.seconds
            rest_s = (1 - FORWARD) * compute_s
            return {
                "after the step": compute_s + exchange_s,
                "under the next forward pass": rest_s + max(compute_s - rest_s, exchange_s),
                "a step late, under all of it": max(compute_s, exchange_s),
            }
        after = blocking_step(exchange.pricing, exchange.nbytes, compute_s)
        under = overlapped_step(exchange.pricing, self.buckets, compute_s)
        return {"after the backward pass": after.seconds, "under the backward pass": under.seconds}

    def record(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        exchanges: list[dict[str, Any]] = [
            {"when": when} | times(step_s, self.compute_s)
            for when, step_s in self.times_s().items()
        ]
        best = max(each["efficiency"] for each in exchanges[:2])
        return self.exchange.record() | {
            "model": self.workload.name,
            "wire": self.exchange.wire,
            "compute_seconds": self.compute_s,
            "exchanges": exchanges,
            "images_per_second": (
                None if self.rate is None else self.rate * self.exchange.ranks * best
            ),
        }

    def jitter_record(self, jitter: float, steps: int, seed: int) -> dict[str, Any]:
        """Return for JSON what ranks of unequal speed cost; raises `UsageError`."""
        algorithm = self.exchange.algorithm
        ranks = self.exchange.ranks
        law = Jitter(self.compute_s, jitter)
        times_s = law.sample(default_rng(seed), steps, ranks)
        if isinstance(algorithm, Gossip):
            ways = (replace(algorithm, staleness=late, weight=None) for late in (0, 1))
            now, late = (
                gossip_efficiency(times_s, way, self.exchange.price.seconds) for way in ways
            )
            return {
                "jitter": asdict(law),
                "efficiency_with_jitter": now,
                "efficiency_one_step_late": late,
            }
        efficiency = mean_efficiency(self.exchange.pricing, self.buckets, times_s)
        return {"jitter": asdict(law), "efficiency_with_jitter": efficiency}


def times(step_s: float, compute_s: float) -> dict[str, float]:
    """Return for JSON how long a step takes, and how well it uses its ranks."""
    return {
        "step_seconds": step_s,
        "exposed_seconds": step_s - compute_s,
        "efficiency": compute_s / step_s,
    }
