# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate exchange``, ``step`` and ``local``: what an exchange and a training step take.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from commrt.algorithm import Algorithm
from commrt.errors import UsageError
from commrt.local_sgd.policy import LocalSGD
from commrt.pricing.cluster import Cluster
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.choosing import choose
from commrt.tools.commands.estimates import ExchangeEstimate, StepEstimate, times
from commrt.tools.commands.output import json_of, table_of
from commrt.tools.commands.price_words import about, quantizer_sentence
from commrt.tools.planning.local_steps import LocalSteps
from commrt.tools.planning.timeline import overlapped_step

OTHERS = {"local": "commrt simulate local", "backup": "commrt simulate backups"}
"""Commands for algorithms whose steps are no exchange of gradients by all ranks."""
MOST_JITTER_TIMES = 10_000_000
"""The most ranks x steps that are simulated one by one."""


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
        chosen, options.ranks, cluster, options.nbytes_on_wire, options.wire
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
