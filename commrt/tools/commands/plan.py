# SPDX-License-Identifier: Apache-2.0
"""``commrt plan exchange``, ``step`` and ``backups``: print plans, best first, and say why.

`planning` finds them; here the best one is also proven. Backups are planned for late ranks that
finish their gradients before they go on, as measured (docs/evidence.md). Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console

from commrt.algorithms.direct import Direct
from commrt.algorithms.ring import Ring, Rings
from commrt.backup_workers.policy import BackupWorkers
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.quantizer import QUANTIZERS
from commrt.tools.commands import arguments as opt
from commrt.tools.commands.backup_estimate import BackupEstimate, estimate_backups
from commrt.tools.commands.choosing import compute_of, workload_called
from commrt.tools.commands.output import json_of, table_of
from commrt.tools.commands.price_words import about, gains, quantizer_sentence
from commrt.tools.planning.bounds import all_reduce_bound_s
from commrt.tools.planning.local_plan import LocalPlan, local_plan
from commrt.tools.planning.planner import Plan, exchange_plans, step_plans
from commrt.tools.planning.stragglers import BackupCost, backup_costs
from commrt.tools.planning.wires import GRADIENT_NBYTES, WirePricing, require_carried
from commrt.tools.planning.workload import Workload

SHOWN = 8
MIN_WIDTH = 124
"""The least width of a table that is printed to a file."""
PROVEN_RANKS = 1100
"""A proof takes memory and time as ranks to the third: half a second here."""
COLUMNS: dict[str, Callable[[Plan], str | None]] = {
    "algorithm": lambda plan: plan.name,
    "backups": lambda plan: str(plan.backups) if plan.backups else None,
    "wire": lambda plan: plan.wire,
    "buckets": lambda plan: None if plan.bucket_cap_mb is None else f"{plan.bucket_cap_mb:g}",
    "step, ms": lambda plan: None if plan.step_s is None else f"{1e3 * plan.step_s:.2f}",
    "updates": lambda plan: f"{plan.updates:.3f}" if plan.backups else None,
    "efficiency": lambda plan: None if plan.efficiency is None else f"{plan.efficiency:.1%}",
    "all, ms": lambda plan: f"{1e3 * plan.exchange_s:.2f}",
    "latencies": lambda plan: f"{1e3 * plan.latency_s:.2f}",
    "steps": lambda plan: f"{plan.steps:,}",
}


def exchange(options: opt.ExchangeOptions, as_json: opt.Json = False) -> None:
    """Recommend an algorithm for an exchange."""
    cluster = Cluster.named(options.cluster)
    quantized = options.wire if options.wire in QUANTIZERS else None
    plans = exchange_plans(cluster, options.ranks, options.nbytes_on_wire, quantized)
    _prove_and_print(plans, cluster, options.ranks, options.nbytes, None, as_json)


def step(options: opt.PlanOptions, ranks: opt.Ranks = 4, as_json: opt.Json = False) -> None:
    """Recommend algorithm, wire and buckets for a training step."""
    cluster = Cluster.named(options.cluster)
    workload = workload_called(options.model)
    plans = _step_plans(options, cluster, workload, ranks, [BackupCost()])
    local = local_plan(plans[0], cluster, ranks)
    _prove_and_print(plans, cluster, ranks, workload.numel * GRADIENT_NBYTES, local, as_json)


def backups(
    options: opt.PlanOptions,
    slow: opt.BackupOptions,
    number: Annotated[
        str,
        typer.Option("--backups", help="auto, or a number of ranks that a step does not wait for."),
    ] = "auto",
    as_json: opt.Json = False,
) -> None:
    """Recommend how many backup workers a training step has, and algorithm, wire and buckets with
    them.
    """
    found = estimate_backups(slow)
    costs = backup_costs(found.times_s, found.goal, sorted(_tried_backups(number, found)))
    cluster = Cluster.named(options.cluster)
    workload = workload_called(options.model)
    plans = _step_plans(options, cluster, workload, found.ranks, costs)
    _prove_and_print(plans, cluster, found.ranks, workload.numel * GRADIENT_NBYTES, None, as_json)


def _tried_backups(number: str, found: BackupEstimate) -> set[int]:
    """Return 0 and `number`; for auto 0, 1, and as many as are best if nothing is exchanged."""
    if number == "auto":
        best: int = found.best_if_late_finish["backups"]
        return {0, 1, best} if found.ranks > 2 else {0, best}
    if not re.fullmatch("[0-9]{1,9}", number):
        raise UsageError(f"--backups {number}: give auto, or a number")
    return {0, int(number)}


def _step_plans(
    options: opt.PlanOptions,
    cluster: Cluster,
    workload: Workload,
    ranks: int,
    costs: Sequence[BackupCost],
) -> list[Plan]:
    """Return the plans of a step, best first; raises `UsageError` if the options do not fit."""
    wires = ["fp32", "bf16"] if options.wire is None else [options.wire.value]
    for number, wire in product({cost.backups for cost in costs} - {0}, wires):
        require_carried(BackupWorkers(number, Direct()), ranks, wire)
    compute_s, _ = compute_of(workload, cluster, options.batch, options.compute_ms)
    return step_plans(cluster, ranks, workload, compute_s, wires, costs)


def _prove_and_print(
    plans: Sequence[Plan],
    cluster: Cluster,
    ranks: int,
    nbytes: float,
    local: LocalPlan | None,
    as_json: bool,
) -> None:
    """Prove the best plan for an exchange of `nbytes` in fp32, and print all plans."""
    best = plans[0]
    schedule = best.algorithm.schedule(0, ranks - best.backups)
    is_proven = schedule.ranks <= PROVEN_RANKS
    if is_proven:
        prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
    if as_json:
        record = {
            "cluster": cluster.name,
            "ranks": ranks,
            "best": _record(best),
            "proven": is_proven,
            "reason": _reason(plans, cluster),
            "lower_bound_seconds": all_reduce_bound_s(cluster, ranks, best.nbytes),
            "local_sgd": None if local is None else _local_record(local),
            "plans": [_record(plan) for plan in plans],
        }
        print(json_of(record))
        return
    _show(f"{ranks:,} ranks of {cluster.name}", plans[:SHOWN])
    print(_reason(plans, cluster))
    if not is_proven:
        print(
            f"not proven: that takes long for more than {PROVEN_RANKS:,} ranks; commrt verify"
            " proves fewer"
        )
    for line in (*_other_backups(plans), *_on_codes(best, ranks, nbytes, cluster)):
        print(line)
    print(best.python)
    if local is not None:
        print(_local_sentence(local))
    print(about(cluster))


def _record(plan: Plan) -> dict[str, Any]:
    return {
        "algorithm": plan.name,
        "python": plan.python,
        "backups": plan.backups,
        "updates": plan.updates,
        "wire": plan.wire,
        "bucket_cap_mb": plan.bucket_cap_mb,
        "step_seconds": plan.step_s,
        "efficiency": plan.efficiency,
        "exchange_seconds": plan.exchange_s,
        "latency_seconds": plan.latency_s,
        "steps": plan.steps,
    }


def _show(title: str, plans: Sequence[Plan]) -> None:
    """Print `plans` as a table, the first one in bold, without columns that are empty."""
    shown = {name: cell for name, cell in COLUMNS.items() if any(cell(plan) for plan in plans)}
    rows = ([cell(plan) or "-" for cell in shown.values()] for plan in plans)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    console.print(table_of(title, [*shown], rows))


def _reason(plans: Sequence[Plan], cluster: Cluster) -> str:
    """Return how the best plan compares with the ring or rings, or else with the second best."""
    best = plans[0]
    alike = [plan for plan in plans[1:] if (plan.wire, plan.backups) == (best.wire, best.backups)]
    others = [plan for plan in alike if plan.algorithm != best.algorithm]
    if not others:
        what = (
            f"no other schedule carries {best.wire}"
            if best.wire in QUANTIZERS
            else "nothing else was found"
        )
        return f"{best.name}: {what} for {cluster.name}"
    other = next((plan for plan in others if isinstance(plan.algorithm, Ring | Rings)), others[0])
    sides = gains(other.exchange_s - best.exchange_s, other.latency_s - best.latency_s, digits=2)
    hidden = (
        ""
        if best.step_s is None
        else f"; in a step {1e3 * (other.seconds - best.seconds):.2f} ms less"
    )
    known = f"{other.name} (as NCCL's rings)" if isinstance(other.algorithm, Rings) else other.name
    return f"{best.name} against {known}, all at once: {sides}{hidden}"


def _on_codes(best: Plan, ranks: int, nbytes: float, cluster: Cluster) -> Iterator[str]:
    """Yield what a quantized wire gains over `nbytes` in fp32, and what quantizing takes."""
    if best.wire not in QUANTIZERS:
        return
    plain = exchange_plans(cluster, ranks, float(nbytes))[0]
    ways = f"{1e3 * best.exchange_s:.2f} ms; fp32 with {plain.name} {1e3 * plain.exchange_s:.2f} ms"
    yield f"{best.nbytes / 1e6:,.1f} MB of {best.wire}, all at once: {ways}"
    schedule = best.algorithm.schedule(0, ranks - best.backups)
    yield quantizer_sentence(
        2 * WirePricing(schedule, cluster, QUANTIZERS[best.wire]).code_s(best.nbytes), cluster
    )
    yield "codes change the arithmetic: compare the accuracy with fp32 on your own model"


def _local_record(local: LocalPlan) -> dict[str, Any]:
    return {
        "python": local.python,
        "period": local.period,
        "delay": local.delay,
        "step_seconds": local.step_s,
    }


def _local_sentence(local: LocalPlan) -> str:
    late = f"{local.delay} step{'s' * (local.delay != 1)}"
    return (
        f"{local.python} would hide the exchange, with steps of"
        f" {1e3 * local.step_s:.2f} ms; weights are then up to {local.period} steps"
        f" apart and averages {late} late, so try the accuracy on your own model"
    )


def _other_backups(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a line for each other number of backups than the best."""
    best = plans[0]
    for number in sorted({plan.backups for plan in plans} - {best.backups}):
        other = next(plan for plan in plans if plan.backups == number)
        ratio = f"{other.seconds / best.seconds:.2f} times as long"
        yield (
            f"with {number} backup{'s' * (number != 1)} instead of {best.backups}: {other.name},"
            f" {ratio} to the goal"
        )
