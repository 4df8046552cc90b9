# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate exchange`` and ``step``: prints what an exchange and a training step take.

The numbers are those of `estimates`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from commrt.algorithm import Algorithm
from commrt.algorithms.catalogue import by_name
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.choosing import choose
from commrt.tools.commands.estimates import ExchangeEstimate, StepEstimate
from commrt.tools.commands.output import json_of, table_of
from commrt.tools.commands.price_words import about, quantizer_sentence

OTHERS = {"local SGD": "commrt simulate local", "backup workers": "commrt simulate backups"}
"""Commands for algorithms whose steps are no exchange of gradients by all ranks, by trait."""
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
    _show_exchange(record, cluster)
    print(about(cluster))


def _chosen(name: str, shape: opt.ShapeOptions, cluster: Cluster, ranks: int) -> Algorithm:
    for trait in getattr(by_name(name), "traits", ()):
        if trait in OTHERS:
            raise UsageError(f"steps of {name} are simulated by another command: {OTHERS[trait]}")
    return choose(name, shape, replace(cluster, gpus_per_node=min(cluster.gpus_per_node, ranks)))


def _show_exchange(record: dict[str, Any], cluster: Cluster) -> None:
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
    _show_exchange(record, cluster)
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
