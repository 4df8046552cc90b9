# SPDX-License-Identifier: Apache-2.0
"""Which layers groups of ranks should share, and what that gains: ``python studies/hybrid_parallelism/plan_hybrid.py``.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from hybrid_prices import HybridPricing, HybridStep, RunCost, closed_form_groups  # of this folder
from rich.console import Console
from rich.table import Table

from commrt.pricing.cluster import Cluster
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.app import main
from commrt.tools.commands.arguments import CLUSTER, StepOptions
from commrt.tools.commands.choosing import BATCH, compute_of, workload_called
from commrt.tools.commands.output import json_of
from commrt.tools.planning.planner import Plan, step_plans
from commrt.tools.planning.workload import Workload

__all__ = ["Prediction", "app", "predict"]

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

ONLY_PRICED = "commrt runs data parallelism only: hybrid parallelism is priced here, not run"
COLUMNS = ("layers", "shape", "parallel", "groups", "closed form", "act., MB", "grad., MB", "act., ms", "grad., ms")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best hybrid step of a workload, and data parallelism beside it."""

    hybrid: HybridStep
    data_parallel: HybridStep
    """Of the same schedules and buckets."""
    plan: Plan
    """The best of all data-parallel ones, as ``commrt plan`` finds it."""
    costs: tuple[RunCost, ...]
    one_rank_s: float
    """Time that one rank computes for the samples of all ranks."""

    def speed_up(self, step: HybridStep | Plan) -> float:
        """Return samples per second, divided by those of one rank that gets the same number of samples in a step."""
        return self.one_rank_s / step.seconds

    @property
    def gains(self) -> bool:
        """Return whether the hybrid step is faster than any data-parallel one."""
        return self.hybrid.seconds < min(self.plan.seconds, self.data_parallel.seconds)


def predict(options: StepOptions, workload: Workload, cluster: Cluster) -> Prediction:
    """Return the best hybrid step; the samples per rank are `options.batch`, or 32. Raises `UsageError`."""
    batch = options.batch or BATCH
    if options.compute_ms is None:
        compute_s, _ = compute_of(workload, cluster, batch, None)
        one_rank_s, _ = compute_of(workload, cluster, batch * options.ranks, None)
    else:
        compute_s = options.compute_ms / 1e3
        one_rank_s = options.ranks * compute_s
    pricing = HybridPricing(cluster, options.ranks, workload, batch, compute_s)
    best = pricing.best()
    plan = step_plans(cluster, options.ranks, workload, compute_s, ["fp32"])[0]
    return Prediction(best, pricing.uniform(options.ranks), plan, tuple(pricing.costs(best)), one_rank_s)


@app.command()
def plan_hybrid(
    model: Annotated[str, typer.Option(help="vgg_a, overfeat_fast, cd_dnn, resnet50, or a file of commrt.Workload.")],
    ranks: Annotated[int, typer.Option(min=1, max=65536, help="Number of ranks.")] = 4,
    cluster: opt.ClusterName = CLUSTER,
    batch: opt.Batch = None,
    compute_ms: opt.ComputeMs = None,
    as_json: opt.Json = False,
) -> None:
    """Find the best groups of ranks for each fully connected layer, and print what each layer then exchanges."""
    options = StepOptions(model, ranks, cluster, batch=batch, compute_ms=compute_ms)
    described, workload = Cluster.named(cluster), workload_called(model)
    found = predict(options, workload, described)
    if as_json:
        told = {"cluster": described.name, "ranks": ranks, "model": workload.name}
        print(json_of(told | _record(options, found)))
        return
    _show(f"{workload.name} on {ranks:,} ranks of {described.name}, {batch or BATCH:,} samples each", options, found)
    for line in (_step_sentence(found.hybrid), _gain_sentence(found, ranks), ONLY_PRICED):
        print(line)
    print(f"{described.name}: {' '.join(described.about.split())}")


def _record(options: StepOptions, found: Prediction) -> dict[str, Any]:
    return {
        "batch": options.batch or BATCH,
        "layers": [_run_record(cost, options) for cost in found.costs],
        "hybrid": _step_record(found.hybrid, found),
        "data_parallel": _step_record(found.data_parallel, found),
        "data_parallel_plan": {
            "algorithm": found.plan.name,
            "bucket_cap_mb": found.plan.bucket_cap_mb,
            "step_seconds": found.plan.seconds,
            "speed_up": found.speed_up(found.plan),
        },
        "gains": found.gains,
        "one_rank_seconds": found.one_rank_s,
        "is_run_by_commrt": False,
    }


def _step_record(step: HybridStep, found: Prediction) -> dict[str, Any]:
    return {
        "step_seconds": step.seconds,
        "compute_seconds": step.compute_s,
        "waiting_for_activations_seconds": step.activations_s,
        "waiting_for_gradients_seconds": step.gradients_s,
        "speed_up": found.speed_up(step),
    }


def _run_record(cost: RunCost, options: StepOptions) -> dict[str, Any]:
    return {
        "first": cost.first + 1,
        "last": cost.first + len(cost.layers),
        "inputs": cost.layers[0].inputs,
        "outputs": cost.layers[0].outputs,
        "parallel": cost.kind(options.ranks),
        "groups": cost.groups,
        "closed_form_groups": _closed_form(cost, options),
        "activations_nbytes": cost.activations_nbytes,
        "gradients_nbytes": cost.gradients_nbytes,
        "activations_seconds": cost.activations_s,
        "gradients_seconds": cost.gradients_s,
    }


def _closed_form(cost: RunCost, options: StepOptions) -> float | None:
    outputs = cost.layers[0].outputs
    return None if outputs is None else closed_form_groups(options.ranks, options.batch or BATCH, outputs)


def _show(title: str, options: StepOptions, found: Prediction) -> None:
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:3] else "right", no_wrap=True)
    for cost in found.costs:
        table.add_row(*_cells(cost, options))
    Console(width=max(Console().width, 110)).print(table)


def _cells(cost: RunCost, options: StepOptions) -> Sequence[str]:
    layer, last = cost.layers[0], cost.first + len(cost.layers)
    closed = _closed_form(cost, options)
    return (
        f"{cost.first + 1}" if len(cost.layers) == 1 else f"{cost.first + 1} to {last}",
        "-" if layer.inputs is None else f"{layer.inputs} x {layer.outputs}",
        cost.kind(options.ranks),
        f"{cost.groups:,}",
        "-" if closed is None else f"{closed:.1f}",
        f"{cost.activations_nbytes / 1e6:,.2f}",
        f"{cost.gradients_nbytes / 1e6:,.2f}",
        f"{1e3 * cost.activations_s:,.2f}",
        f"{1e3 * cost.gradients_s:,.2f}",
    )


def _step_sentence(step: HybridStep) -> str:
    return (
        f"a step takes {1e3 * step.seconds:.2f} ms: {1e3 * step.compute_s:.2f} to compute, "
        f"{1e3 * step.activations_s:.2f} waiting for activations, {1e3 * step.gradients_s:.2f} for gradients at its end"
    )


def _gain_sentence(found: Prediction, ranks: int) -> str:
    plan = found.plan
    told = (
        f"{ranks:,} ranks are {found.speed_up(found.hybrid):.1f} times as fast as one; the best data-parallel plan, "
        f"with {plan.name}, {found.speed_up(plan):.1f} times, with steps of {1e3 * plan.seconds:.2f} ms"
    )
    return told if found.gains else f"{told}\nhybrid parallelism gains nothing here: take data parallelism"


if __name__ == "__main__":
    main(app)
