# SPDX-License-Identifier: Apache-2.0
"""``commrt plan``: which algorithm, grid, wire and buckets to use, how many backup workers, and why. Needs no torch.

Advice on backups assumes that a late rank finishes its gradient before it goes on, as measured (docs/evidence.md). The
published rule assumes that all ranks begin each step together; its answer is printed too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import isnan
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.ring import Ring
from commrt.cli.options import Case, Question, compute_of, json_of, workload_of
from commrt.cli.simulate import CLUSTER, Answer, Row, answer, show, span
from commrt.cost.cluster import Cluster
from commrt.cost.planner import BackupCost, Plan, exchange_plans, step_plans
from commrt.cost.price import all_reduce_bound_s
from commrt.cost.stragglers import step_time_s
from commrt.errors import UsageError
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce

__all__ = ["run", "run_backups", "waitings"]

SHOWN = 8
MIN_WIDTH = 124
"""Of the table: names that are cut off cannot be told apart."""
PROVEN_RANKS = 1100
"""A proof takes memory and time as ranks to the third: half a second here."""
AUTO = "auto"
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


def run(case: Case, wires: Sequence[str], as_json: bool, waitings: Sequence[BackupCost] = ()) -> None:
    """Rank all plans of `case`, and print them with the reason; raises `UsageError`."""
    case.check()
    cluster = Cluster.named(case.cluster or CLUSTER)
    plans = _plans(case, cluster, wires, waitings)
    best, is_proven = plans[0], case.ranks <= PROVEN_RANKS
    if case.ranks - best.backups <= PROVEN_RANKS:
        schedule = best.algorithm.schedule(0, case.ranks - best.backups)
        prove(schedule, all_reduce(schedule.ranks, schedule.chunks))
    if as_json:
        record = {
            "cluster": cluster.name,
            "ranks": case.ranks,
            "best": _record(best),
            "proven": is_proven,
            "reason": _reason(plans, cluster),
            "lower_bound_seconds": all_reduce_bound_s(cluster, case.ranks, best.nbytes),
            "plans": [_record(plan) for plan in plans],
        }
        print(json_of(record))
        return
    _show(f"{case.ranks:,} ranks of {cluster.name}", plans[:SHOWN])
    print(_reason(plans, cluster))
    if not is_proven:
        print(f"not proven: that takes long for more than {PROVEN_RANKS:,} ranks; commrt verify proves fewer")
    for line in _other_backups(plans):
        print(line)
    print(best.python)
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def _plans(case: Case, cluster: Cluster, wires: Sequence[str], waitings: Sequence[BackupCost]) -> list[Plan]:
    if case.model is None:
        return exchange_plans(cluster, case.ranks, case.nbytes or 0.0)
    workload = workload_of(case.model)
    compute_s, _ = compute_of(case, workload, cluster)
    if waitings:
        return step_plans(cluster, case.ranks, workload, compute_s, wires, waitings)
    return step_plans(cluster, case.ranks, workload, compute_s, wires)


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
    table = Table(title=title)
    for name in shown:
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    for plan in plans:
        table.add_row(*(cell(plan) or "-" for cell in shown.values()), style="bold" if plan is plans[0] else None)
    Console(width=max(Console().width, MIN_WIDTH)).print(table)


def _reason(plans: Sequence[Plan], cluster: Cluster) -> str:
    """Return how the best plan compares with the ring, or else with the second best."""
    best = plans[0]
    alike = [plan for plan in plans[1:] if (plan.wire, plan.backups) == (best.wire, best.backups)]
    others = [plan for plan in alike if plan.algorithm != best.algorithm]
    if not others:
        return f"{best.name}: nothing else was found for {cluster.name}"
    other = next((plan for plan in others if plan.algorithm == Ring()), others[0])
    latency_s = other.latency_s - best.latency_s
    less_s = {"latencies": latency_s, "bytes": other.exchange_s - best.exchange_s - latency_s}
    sides = [f"{abs(1e3 * gain):.2f} ms {'less' if gain >= 0 else 'more'} for {what}" for what, gain in less_s.items()]
    hidden = "" if best.step_s is None else f"; in a step {1e3 * (other.seconds - best.seconds):.2f} ms less"
    return f"{best.name} against {other.name}, all at once: {' and '.join(sides)}{hidden}"


def _other_backups(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a line for each other number of backups than the best."""
    best = plans[0]
    for number in sorted({plan.backups for plan in plans} - {best.backups}):
        other = next(plan for plan in plans if plan.backups == number)
        ratio = f"{other.seconds / best.seconds:.2f} times as long"
        yield f"with {_backups(number)} instead of {best.backups}: {other.name}, {ratio} to the goal"


def waitings(backups: str, question: Question) -> tuple[int, list[BackupCost]]:
    """Return the number of ranks, and how steps change with no backups and with `backups`.

    For auto: with one, and with as many as are best if nothing is exchanged.
    """
    found = answer(question)
    if backups == AUTO:
        tried = {0, found.ranks - found.best_if_late_finish} | ({1} if found.ranks > 2 else set())
    else:
        tried = {0, _number(backups)}
    needed = np.array([BackupWorkers(number).needed(found.ranks) for number in sorted(tried)])
    updates = found.goal.iterations(needed) / found.goal.iterations(np.array([found.ranks]))
    for count, known in zip(needed.tolist(), updates.tolist(), strict=True):
        _require_known(count, known)
    slower = step_time_s(found.times_s, needed) / float(np.median(found.times_s))
    columns = (column.tolist() for column in (found.ranks - needed, slower, updates))
    return found.ranks, [BackupCost(*row) for row in zip(*columns, strict=True)]


def run_backups(backups: str, question: Question, as_json: bool) -> None:
    """Print how many backups to use, and how `backups` compares if it is a number."""
    wanted = None if backups == AUTO else _number(backups)
    found = answer(question)
    if wanted is not None and wanted >= found.ranks:
        raise UsageError(f"--backups {wanted} of {found.ranks} ranks leaves none: give up to {found.ranks - 1}")
    rows = found.rows([] if wanted is None else [found.ranks - wanted])
    best = next(row for row in rows if row["quorum"] == found.best_if_late_finish)
    asked = best if wanted is None else next(row for row in rows if row["backups"] == wanted)
    _require_known(asked["quorum"], asked["late_finish_relative_time"])
    low, high = found.choice.likely
    if as_json:
        record = {
            "backups": best["backups"],
            "best_quorum": best["quorum"],
            "backups_if_all_begin_together": found.ranks - found.choice.best,
            "likely_backups_if_all_begin_together": [found.ranks - high, found.ranks - low],
            "asked": asked,
            "table": rows,
        }
        print(json_of(record | found.record()))
        return
    show(found, rows, best["quorum"])
    print(_advice(found, rows[-1], best))
    if asked != best:
        ratio = asked["late_finish_relative_time"] / best["late_finish_relative_time"]
        print(f"{_backups(asked['backups'])}: {ratio:.2f} times as long as with {best['backups']}")


def _number(backups: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", backups):
        raise UsageError(f"--backups {backups}: give auto, or a number")
    return int(backups)


def _require_known(quorum: int, value: float) -> None:
    if isnan(value):
        raise UsageError(f"no count of updates is known for {quorum} gradients each: give fewer backups, or --exponent")


def _advice(found: Answer, whole: Row, best: Row) -> str:
    """Return how many backups to use and why; `whole` waits for all ranks."""
    low, high = found.choice.likely
    rule = (
        f"the published rule, by which all begin each step together, says {found.ranks - found.choice.best} "
        f"({span(found.ranks - high, found.ranks - low)})"
    )
    if not best["backups"]:
        return f"use no backups: shorter steps would save less than the additional updates cost; {rule}"
    best_s, all_s, time = best["late_finish_step_s"], whole["late_finish_step_s"], best["late_finish_relative_time"]
    return (
        f"use {_backups(best['backups'])}: a step ends with gradient {best['quorum']} of {found.ranks}, after "
        f"{best_s:.4g} s instead of {all_s:.4g} s, where a late rank first finishes its own; with "
        f"{time * all_s / best_s:.2f} times the updates the goal takes {time:.2f} of the time. "
        f"{rule[0].upper()}{rule[1:]}"
    )


def _backups(number: int) -> str:
    return f"{number} backup{'s' * (number != 1)}"
