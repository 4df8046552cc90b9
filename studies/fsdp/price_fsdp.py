# SPDX-License-Identifier: Apache-2.0
"""The price of a step whose parameters are sharded: ``python studies/fsdp/price_fsdp.py``. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from sharded_steps import Halves, ShardedStep, sharded_step, sharding_candidates, units_of  # of this folder

from commrt.algorithms.direct import Direct
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.ring import Ring
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import CLUSTER, StepOptions, Wire
from commrt.tools.commands.choosing import compute_of, workload_called
from commrt.tools.commands.output import json_of
from commrt.tools.planning.planner import CAPS_MB, Plan, step_plans
from commrt.tools.planning.python_calls import short_name
from commrt.tools.planning.wires import GRADIENT_NBYTES, ITEMS, wire_nbytes
from commrt.tools.planning.workload import Workload

__all__ = ["app"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

SHOWN = 6
MIN_WIDTH = 140
"""Of the table: names that are cut off cannot be told apart."""
MOST_RANKS = 1024
UNITS_MB = (*CAPS_MB, 200.0, 400.0)
"""Sizes of units that are tried."""
OFFERED = Ring, HalvingDoubling, Direct
"""Algorithms whose halves the backend of torch.distributed has."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One way to shard, and its step."""

    halves: Halves
    wire: str
    unit_mb: float
    step: ShardedStep

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "algorithm": short_name(self.halves.algorithm),
            "backend": isinstance(self.halves.algorithm, OFFERED),
            "wire": self.wire,
            "unit_mb": self.unit_mb,
            "exchange_seconds": self.step.exchange_s,
            "step_seconds": self.step.seconds,
            "exposed_seconds": self.step.exposed_s,
            "efficiency": self.step.efficiency,
        }


@app.command()
def price_fsdp(
    model: Annotated[
        str, typer.Option(help="As for commrt simulate step, such as resnet50 or transformer:2048x24x1024.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 4,
    cluster: opt.ClusterName = CLUSTER,
    wire: Annotated[Wire | None, typer.Option(show_default="fp32 and bf16", help="What travels.")] = None,
    unit_mb: Annotated[
        float | None, typer.Option(show_default="the best of several", help="Size of a unit of layers in fp32, in MB.")
    ] = None,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
    as_json: opt.Json = False,
) -> None:
    """Price a step of FSDP with each schedule, wire and unit, beside a step that replicates the parameters."""
    wires = ["fp32", "bf16"] if wire is None else [wire.value]
    options = StepOptions(model, ranks, cluster, Wire(wires[0]), batch=batch, compute_ms=compute_ms)
    workload, described = _checked(options)
    compute_s, _ = compute_of(workload, described, batch, compute_ms)
    rows = _rows(ranks, workload, described, compute_s, wires, UNITS_MB if unit_mb is None else [unit_mb])
    replicated = step_plans(described, ranks, workload, compute_s, wires)[0]
    if as_json:
        print(json_of(_record(options, workload, described, rows, replicated)))
        return
    Console(width=max(Console().width, MIN_WIDTH)).print(_table(options, workload, described, rows, replicated))
    print(_memory(workload, ranks, rows[0].unit_mb))
    print("backend: a schedule that backend='commrt' of torch.distributed has; commrt runs FSDP through it")
    print(f"{described.name}: {' '.join(described.about.split())}")


def _checked(options: StepOptions) -> tuple[Workload, Cluster]:
    if options.wire in QUANTIZERS:
        raise UsageError(f"--wire {options.wire}: codes would round the parameters; give fp32, bf16 or fp16")
    if options.ranks > MOST_RANKS:
        raise UsageError(
            f"--ranks {options.ranks}: FSDP is priced up to {MOST_RANKS:,} ranks, which takes half a minute"
        )
    cluster = Cluster.named(options.cluster)
    cluster.require_capacity(options.ranks)
    return workload_called(options.model), cluster


def _rows(
    ranks: int, workload: Workload, cluster: Cluster, compute_s: float, wires: Sequence[str], units_mb: Sequence[float]
) -> list[_Row]:
    """Return a row for each schedule and wire, the shortest step first; of equal ones the one of larger units."""
    found = list[_Row]()
    for halves in sharding_candidates(cluster, ranks, float(workload.numel * GRADIENT_NBYTES)):
        for wire in wires:
            itemsize = int(wire_nbytes(1, ITEMS[wire]))
            steps = {
                mb: sharded_step(units_of(workload, mb), halves, compute_s, itemsize) for mb in sorted(units_mb)[::-1]
            }
            best = min(steps, key=lambda mb: round(steps[mb].seconds, 9))
            found.append(_Row(halves, wire, best, steps[best]))
    return sorted(found, key=lambda row: (round(row.step.seconds, 9), row.halves.all_gather.steps))


def _record(
    options: StepOptions, workload: Workload, cluster: Cluster, rows: Sequence[_Row], replicated: Plan
) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "ranks": options.ranks,
        "model": workload.name,
        "compute_seconds": rows[0].step.compute_s,
        "best": rows[0].record(),
        "replicated": {
            "algorithm": replicated.name,
            "wire": replicated.wire,
            "step_seconds": replicated.step_s,
            "efficiency": replicated.efficiency,
        },
        "plans": [row.record() for row in rows],
    }


def _table(options: StepOptions, workload: Workload, cluster: Cluster, rows: Sequence[_Row], replicated: Plan) -> Table:
    compute_ms = 1e3 * rows[0].step.compute_s
    title = f"FSDP of {workload.name}, {options.ranks:,} ranks of {cluster.name}, {compute_ms:.2f} ms to compute"
    table = Table(title=title)
    for column in (
        "halves of",
        "wire",
        "units, MB",
        "exchanges, ms",
        "step, ms",
        "not hidden, ms",
        "efficiency",
        "backend",
    ):
        table.add_column(column, justify="left" if column == "halves of" else "right", no_wrap=True)
    for row in rows[:SHOWN]:
        facts = row.record()
        times = (f"{1e3 * facts[key]:.2f}" for key in ("exchange_seconds", "step_seconds", "exposed_seconds"))
        cells = row.wire, f"{row.unit_mb:g}", *times, f"{facts['efficiency']:.1%}", "yes" if facts["backend"] else "-"
        table.add_row(facts["algorithm"], *cells, style="bold" if row is rows[0] else None)
    step_s, exposed_s = replicated.step_s or 0.0, (replicated.step_s or 0.0) - rows[0].step.compute_s
    times = (f"{1e3 * seconds:.2f}" for seconds in (replicated.exchange_s, step_s, exposed_s))
    name, mb = f"replicated: {replicated.name}", f"{replicated.bucket_cap_mb:g}"
    table.add_row(name, replicated.wire or "", mb, *times, f"{replicated.efficiency or 0.0:.1%}", "")
    return table


def _memory(workload: Workload, ranks: int, unit_mb: float) -> str:
    """Return what a rank holds of parameters and gradients."""
    largest = max(unit.numel for unit in units_of(workload, unit_mb))
    all_mb, share_mb, unit = (
        numel * GRADIENT_NBYTES / 1e6 for numel in (workload.numel, workload.numel / ranks, largest)
    )
    held = f"{2 * share_mb:,.1f} MB, and up to two units of {unit:,.1f} MB"
    return f"fp32 parameters and gradients of a rank: {held}; replicated {2 * all_mb:,.1f} MB"


if __name__ == "__main__":
    main(app)
