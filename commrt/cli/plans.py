# SPDX-License-Identifier: Apache-2.0
"""``commrt plan`` of an exchange: which algorithm, grid, wire and buckets, and why. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from commrt.algorithms.ring import Ring
from commrt.cli.outputs import json_of
from commrt.cli.pricing import CLUSTER, Case, compute_of, workload_of
from commrt.collective import all_reduce
from commrt.pricing.cluster import Cluster
from commrt.pricing.planning import Plan, Waiting, backed_plans, exchange_plans, step_plans
from commrt.pricing.simulate import all_reduce_bound_s
from commrt.proving.proof import prove
from commrt.schedule import Algorithm

__all__ = ["run"]

SHOWN = 8
WIDTH = 124
"""Of the table at least: names that are cut off cannot be told apart."""
PROVEN_RANKS = 1100
"""A proof takes memory and time as ranks to the third: half a second here."""

AUTO = "auto"

COLUMNS: tuple[tuple[str, Callable[[Plan], str | None]], ...] = (
    ("algorithm", lambda plan: plan.name),
    ("backups", lambda plan: str(plan.backups) if plan.backups else None),
    ("wire", lambda plan: plan.wire),
    ("buckets", lambda plan: None if plan.bucket_cap_mb is None else f"{plan.bucket_cap_mb:g}"),
    ("step, ms", lambda plan: None if plan.step_s is None else f"{1e3 * plan.step_s:.2f}"),
    ("updates", lambda plan: f"{plan.updates:.3f}" if plan.backups else None),
    ("efficiency", lambda plan: None if plan.efficiency is None else f"{plan.efficiency:.1%}"),
    ("all, ms", lambda plan: f"{1e3 * plan.exchange_s:.2f}"),
    ("latencies", lambda plan: f"{1e3 * plan.latency_s:.2f}"),
    ("steps", lambda plan: f"{plan.steps:,}"),
)


def run(case: Case, wires: Sequence[str], as_json: bool, waitings: Sequence[Waiting] = ()) -> None:
    """Rank all plans of `case`, print them and the reason; raises `UsageError`."""
    case.check()
    cluster = Cluster.named(case.cluster or CLUSTER)
    plans = _plans(case, cluster, wires, waitings)
    _prove(plans[0].algorithm, case.ranks - plans[0].backups)
    if as_json:
        print(json_of(_record(case, cluster, plans)))
    else:
        _show(case, cluster, plans)


def _plans(case: Case, cluster: Cluster, wires: Sequence[str], waitings: Sequence[Waiting]) -> list[Plan]:
    if case.model is None:
        return exchange_plans(cluster, case.ranks, case.nbytes or 0.0)
    workload = workload_of(case.model)
    compute_s, _ = compute_of(case, workload, cluster)
    if waitings:
        return backed_plans(cluster, case.ranks, workload, compute_s, wires, waitings)
    return step_plans(cluster, case.ranks, workload, compute_s, wires)


def _prove(algorithm: Algorithm, ranks: int) -> None:
    if ranks <= PROVEN_RANKS:
        schedule = algorithm.schedule(0, ranks)
        prove(schedule, all_reduce(ranks, schedule.chunks))


def _record(case: Case, cluster: Cluster, plans: Sequence[Plan]) -> dict[str, Any]:
    best = _told(plans[0])
    return {
        "cluster": cluster.name,
        "ranks": case.ranks,
        "best": best,
        "proven": case.ranks <= PROVEN_RANKS,
        "reason": _reason(plans, cluster),
        "lower_bound_seconds": all_reduce_bound_s(cluster, case.ranks, plans[0].nbytes),
        "plans": [_told(plan) for plan in plans],
    }


def _told(plan: Plan) -> dict[str, Any]:
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


def _show(case: Case, cluster: Cluster, plans: Sequence[Plan]) -> None:
    shown = plans[:SHOWN]
    columns = [column for column in COLUMNS if any(column[1](plan) is not None for plan in shown)]
    table = Table(title=f"{case.ranks:,} ranks of {cluster.name}")
    for title, _ in columns:
        table.add_column(title, justify="left" if title == "algorithm" else "right", no_wrap=True)
    for plan in shown:
        table.add_row(*(cell(plan) or "-" for _, cell in columns), style="bold" if plan is plans[0] else None)
    Console(width=max(Console().width, WIDTH)).print(table)
    print(_reason(plans, cluster))
    if case.ranks > PROVEN_RANKS:
        print(f"not proven here: that takes long for more than {PROVEN_RANKS:,} ranks; commrt verify proves fewer")
    for line in _others(plans):
        print(line)
    print(plans[0].python)
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def _reason(plans: Sequence[Plan], cluster: Cluster) -> str:
    """Against the ring, or what comes next to it."""
    best = plans[0]
    alike = [plan for plan in plans[1:] if (plan.wire, plan.backups) == (best.wire, best.backups)]
    others = [plan for plan in alike if plan.algorithm != best.algorithm]
    if not others:
        return f"{best.name}: nothing else was found for {cluster.name}"
    other = next((plan for plan in others if plan.algorithm == Ring()), others[0])
    less = {"latencies": other.latency_s - best.latency_s, "bytes": _bytes_s(other) - _bytes_s(best)}
    sides = [f"{abs(1e3 * gain):.2f} ms {'less' if gain >= 0 else 'more'} for {what}" for what, gain in less.items()]
    hidden = "" if best.step_s is None else f"; in a step {1e3 * (other.seconds - best.seconds):.2f} ms less"
    return f"{best.name} against {other.name}, all at once: {' and '.join(sides)}{hidden}"


def _others(plans: Sequence[Plan]) -> Iterator[str]:
    """With other numbers of backups than the best."""
    best = plans[0]
    numbers = sorted({plan.backups for plan in plans} - {best.backups})
    for number in numbers:
        other = next(plan for plan in plans if plan.backups == number)
        ratio = f"{other.seconds / best.seconds:.2f} times as long"
        yield f"with {number} backup{'s' * (number != 1)} instead of {best.backups}: {other.name}, {ratio} to the goal"


def _bytes_s(plan: Plan) -> float:
    return plan.exchange_s - plan.latency_s
