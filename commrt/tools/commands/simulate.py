# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate exchange``, ``step`` and ``local``: what an exchange and a training step take.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.random import default_rng
from rich.console import Console
from rich.table import Table

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.local_sgd.policy import LocalSGD
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Price
from commrt.schedule import Algorithm
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.choosing import choose
from commrt.tools.commands.output import about, json_of, table_of
from commrt.tools.planning.bounds import all_reduce_bound_s, exchange_bound_s
from commrt.tools.planning.stragglers import Jitter
from commrt.tools.planning.timeline import (
    LocalSteps,
    blocking_step,
    gossip_efficiency,
    mean_efficiency,
    overlapped_step,
)
from commrt.tools.planning.wires import ITEMS, QUANTIZERS, WirePricing, require_carried, wire_nbytes
from commrt.tools.planning.workload import FORWARD, Workload

OTHERS = {"local": "commrt simulate local", "backup": "commrt simulate backups"}
"""Commands for algorithms whose steps are no exchange of gradients by all ranks."""
MOST_JITTER_TIMES = 10_000_000
"""The most ranks x steps that are simulated one by one."""


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
            "algorithm": str(self.algorithm),
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
        workload = opt.workload_of(options.model)
        nbytes = wire_nbytes(workload.numel, ITEMS[options.wire])
        exchange = ExchangeEstimate(algorithm, options.ranks, cluster, nbytes, options.wire)
        computing = opt.compute_of(workload, cluster, options.batch, options.compute_ms)
        return cls(exchange, workload, *computing, options.bucket_cap_mb)

    @cached_property
    def buckets(self) -> list[Any]:
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


def exchange(
    algorithm: opt.AlgorithmName,
    options: opt.ExchangeOptions,
    shape: opt.ShapeOptions,
    as_json: opt.Json = False,
) -> None:
    """Estimate how long an exchange takes, and what no schedule can beat."""
    cluster = Cluster.named(options.cluster)
    chosen = _chosen(algorithm, shape, cluster, options.ranks)
    record = ExchangeEstimate(
        chosen, options.ranks, cluster, options.wire_nbytes, options.wire
    ).record()
    if as_json:
        print(json_of(record))
        return
    _show(record, cluster)
    print(about(cluster))


def _chosen(name: str, shape: opt.ShapeOptions, cluster: Cluster, ranks: int) -> Algorithm:
    if name in OTHERS:
        raise UsageError(f"steps of {name} are simulated by another command: {OTHERS[name]}")
    return choose(name, shape, replace(cluster, gpus_per_node=min(cluster.gpus_per_node, ranks)))


def _show(record: dict[str, Any], cluster: Cluster) -> None:
    optimal = "" if record["of_optimal"] is None else f", {record['of_optimal']:.2f}x of optimal"
    print(
        f"{record['algorithm']} on {record['ranks']:,} ranks of {cluster.name}:"
        f" {record['nbytes'] / 1e6:,.1f} MB in {record['steps']:,} steps and"
        f" {1e3 * record['seconds']:.3f} ms (no schedule is below"
        f" {1e3 * record['lower_bound_seconds']:.3f} ms{optimal})"
    )
    if "coding_seconds" in record:
        print(quantizer_sentence(record["coding_seconds"], cluster))


def quantizer_sentence(seconds: float, cluster: Cluster) -> str:
    """Return what of the price is for turning values into codes and back."""
    if cluster.code_gbytes_per_s is None:
        return (
            f"quantizing is taken to need no time: {cluster.name} has no code_gbytes_per_s; commrt"
            " probe measures it"
        )
    return f"{1e3 * seconds:.3f} ms of it is for turning values into codes and back"


def step(
    algorithm: opt.AlgorithmName,
    options: opt.StepOptions,
    jitter: opt.JitterOptions,
    shape: opt.ShapeOptions,
    as_json: opt.Json = False,
) -> None:
    """Estimate a training step, and how much of its exchange is hidden."""
    most_steps = MOST_JITTER_TIMES // options.ranks
    if jitter.steps > most_steps:
        raise UsageError(
            f"{jitter.steps:,} steps of {options.ranks:,} ranks are too many: give up to --steps"
            f" {most_steps}"
        )
    cluster = Cluster.named(options.cluster)
    estimate = StepEstimate.of(_chosen(algorithm, shape, cluster, options.ranks), options, cluster)
    record = estimate.record()
    if jitter.jitter is not None:
        record |= estimate.jitter_record(jitter.jitter, jitter.steps, jitter.seed)
    if as_json:
        print(json_of(record))
        return
    _show(record, cluster)
    _show_steps(record)
    print(about(cluster))


def _show_steps(record: dict[str, Any]) -> None:
    title = (
        f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to"
        " compute"
    )
    Console().print(
        step_table(title, "exchange", {each["when"]: each for each in record["exchanges"]})
    )
    if "jitter" in record:
        late = record.get("efficiency_one_step_late")
        also = "" if late is None else f"; one step late {late:.1%}"
        variation = record["jitter"]["variation"]
        print(
            f"if computing varies by {variation:.0%}: efficiency"
            f" {record['efficiency_with_jitter']:.1%}{also}"
        )


def times(step_s: float, compute_s: float) -> dict[str, float]:
    """Return for JSON how long a step takes, and how well it uses its ranks."""
    return {
        "step_seconds": step_s,
        "exposed_seconds": step_s - compute_s,
        "efficiency": compute_s / step_s,
    }


def step_table(
    title: str, heading: str, rows: Mapping[str, Mapping[str, Any]], asked: str | None = None
) -> Table:
    """Return a table of `times`, the row that was `asked` for in bold."""
    cells = [
        (
            name,
            f"{1e3 * row['step_seconds']:.2f}",
            f"{1e3 * row['exposed_seconds']:.2f}",
            f"{row['efficiency']:.1%}",
        )
        for name, row in rows.items()
    ]
    bold = None if asked is None else [*rows].index(asked)
    return table_of(title, (heading, "step, ms", "not hidden, ms", "efficiency"), cells, bold)


def local(options: opt.StepOptions, local: opt.LocalOptions, as_json: opt.Json = False) -> None:
    """Estimate steps of local SGD, by how late averages may be."""
    algorithm = local.algorithm(options.wire)
    found = StepEstimate.of(algorithm.inner, options, Cluster.named(options.cluster))
    exchange = found.exchange
    steps = LocalSteps.priced(
        exchange.pricing, exchange.nbytes, found.compute_s, algorithm.period, algorithm.fragments
    )
    record = _local_record(algorithm, found, steps)
    if as_json:
        print(json_of(record))
    else:
        _show_local(record, exchange, algorithm)


def _local_record(algorithm: LocalSGD, step: StepEstimate, steps: LocalSteps) -> dict[str, Any]:
    exchange = step.exchange
    compute_s = step.compute_s
    synchronous_s = overlapped_step(exchange.pricing, step.buckets, compute_s).seconds
    return {
        "algorithm": str(algorithm),
        "ranks": exchange.ranks,
        "cluster": exchange.cluster.name,
        "model": step.workload.name,
        "wire": exchange.wire,
        "nbytes": exchange.nbytes,
        "seconds": steps.exchange_s,
        "compute_seconds": compute_s,
        "period": algorithm.period,
        "delay": algorithm.delay,
        "fragments": algorithm.fragments,
        "synchronous": times(synchronous_s, compute_s),
        "delays": [
            {"delay": delay} | times(steps.step_s(delay), compute_s)
            for delay in delays_to_try(algorithm)
        ],
        "hiding_delay": steps.hiding_delay,
    }


def delays_to_try(algorithm: LocalSGD) -> list[int]:
    """Return 0, powers of two below the period, the period and `algorithm`'s delay, in order.

    >>> delays_to_try(LocalSGD(period=10, delay=3))
    [0, 1, 2, 3, 4, 8, 10]
    """
    powers = [2**i for i in range((algorithm.period - 1).bit_length())]
    return sorted({0, *powers, algorithm.period, algorithm.delay})


def _show_local(record: dict[str, Any], exchange: ExchangeEstimate, algorithm: LocalSGD) -> None:
    cluster = exchange.cluster
    size = f"{record['nbytes'] / 1e6:,.1f} MB"
    parts = f", in {record['fragments']:,} fragments" * (record["fragments"] > 1)
    place = f"{record['ranks']:,} ranks of {cluster.name}"
    print(
        f"{algorithm.inner} on {place}: {size} in {1e3 * record['seconds']:.3f} ms once per"
        f" period{parts}"
    )
    if exchange.pricing.quantizer is not None:
        coding_s = (
            2 * algorithm.fragments * exchange.pricing.code_s(exchange.nbytes / algorithm.fragments)
        )
        print(quantizer_sentence(coding_s, cluster))
    title = (
        f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to"
        f" compute, period {record['period']:,}"
    )
    rows = {
        "synchronous": record["synchronous"],
        **{str(each["delay"]): each for each in record["delays"]},
    }
    Console().print(step_table(title, "delay", rows, str(record["delay"])))
    hiding = record["hiding_delay"]
    print(
        "smallest delay that hides the exchange:"
        f" {'none within the period' if hiding is None else hiding}"
    )
    print(about(cluster))
