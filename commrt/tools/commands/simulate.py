# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate``: the price of an exchange, a training step, or steps with backup workers. Needs no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, inf, isnan
from typing import Any

import numpy as np
from numpy.random import default_rng
from rich.console import Console
from rich.table import Table

from commrt.algorithms.gossip import Gossip
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.price import Price, Pricing, all_reduce_bound_s, exchange_bound_s
from commrt.pricing.wires import ITEMS, QUANTIZERS, require_carried, wire_nbytes
from commrt.schedule import Algorithm
from commrt.tools.commands.json_output import json_of
from commrt.tools.commands.options import CLUSTER, JITTER_STEPS, BackupOptions, ExchangeOptions, compute_of, workload_of
from commrt.tools.pictures.traces import read_times
from commrt.tools.planning.stragglers import (
    Exponential,
    HeavyTails,
    Jitter,
    PerRank,
    Published,
    QuorumChoice,
    Recorded,
    Scaling,
    SlowSteps,
    Times,
    choose,
    step_time_s,
)
from commrt.tools.planning.timeline import blocking_step, gossip_efficiency, mean_efficiency, overlapped_step
from commrt.tools.planning.workload import FORWARD, Workload

__all__ = [
    "BackupEstimate",
    "ExchangeEstimate",
    "estimate_backups",
    "quantizer_sentence",
    "run",
    "run_backups",
]


@dataclass(frozen=True)
class ExchangeEstimate:
    """The price of one algorithm with one set of options."""

    algorithm: Algorithm
    options: ExchangeOptions
    cluster: Cluster

    @cached_property
    def pricing(self) -> Pricing:
        """Return the pricing of the first step's schedule; raises `UsageError` if it cannot carry the wire's codes."""
        self.cluster.require_capacity(self.options.ranks)
        require_carried(self.algorithm, self.options.ranks, self.options.wire)
        schedule = self.algorithm.schedule(0, self.options.ranks)
        return Pricing(schedule, self.cluster, QUANTIZERS.get(self.options.wire))

    @cached_property
    def workload(self) -> Workload | None:
        """Return what is trained; None without --model."""
        return None if self.options.model is None else workload_of(self.options.model)

    @property
    def nbytes(self) -> float:
        """Return how many bytes each rank contributes, on the wire."""
        if self.workload is None:
            return self.options.wire_nbytes
        return wire_nbytes(self.workload.numel, ITEMS[self.options.wire])

    def price(self) -> Price:
        """Return the price of all bytes at once. Partners of gossip change, so there it is the mean of two periods."""
        first = self.pricing.price(self.nbytes)
        if not isinstance(self.algorithm, Gossip):
            return first
        steps = range(1, 2 * self.algorithm.period(self.options.ranks))
        others = (Pricing(self.algorithm.schedule(step, self.options.ranks), self.cluster) for step in steps)
        finish_s = [first.finish_s, *(other.price(self.nbytes).finish_s for other in others)]
        return Price(np.full(self.options.ranks, np.mean([each.max() for each in finish_s])), first.steps)

    def record(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        price, bound = self.price(), exchange_bound_s if isinstance(self.algorithm, Gossip) else all_reduce_bound_s
        bound_s = bound(self.cluster, self.options.ranks, self.nbytes)
        known: dict[str, Any] = {
            "algorithm": str(self.algorithm),
            "ranks": self.options.ranks,
            "cluster": self.cluster.name,
            "nbytes": self.nbytes,
            "seconds": price.seconds,
            "lower_bound_seconds": bound_s,
            "of_optimal": price.seconds / bound_s if bound_s else None,
            "steps": price.steps,
        }
        if self.pricing.quantizer is not None:
            known |= {"wire": self.options.wire, "coding_seconds": 2 * self.pricing.code_s(self.nbytes)}
        return known if self.workload is None else known | self._step_record(self.workload, price.seconds)

    def _step_record(self, workload: Workload, exchange_s: float) -> dict[str, Any]:
        compute_s, rate = compute_of(self.options, workload, self.cluster)
        exchanges: list[dict[str, Any]] = [
            {"when": when, "step_seconds": s, "exposed_seconds": s - compute_s, "efficiency": compute_s / s}
            for when, s in self.step_times_s(workload, compute_s, exchange_s).items()
        ]
        best = max(each["efficiency"] for each in exchanges[:2])
        found = {
            "model": workload.name,
            "wire": self.options.wire,
            "compute_seconds": compute_s,
            "exchanges": exchanges,
            "images_per_second": None if rate is None else rate * self.options.ranks * best,
        }
        return found if self.options.jitter is None else found | self._jitter_record(workload, compute_s, exchange_s)

    def step_times_s(self, workload: Workload, compute_s: float, exchange_s: float) -> dict[str, float]:
        """Return the time of a step by when it exchanges."""
        if isinstance(self.algorithm, Gossip):  # of weights, which exist only after the step
            rest_s = (1 - FORWARD) * compute_s
            return {
                "after the step": compute_s + exchange_s,
                "under the next forward pass": rest_s + max(compute_s - rest_s, exchange_s),
                "a step late, under all of it": max(compute_s, exchange_s),
            }
        after = blocking_step(self.pricing, self.nbytes, compute_s)
        under = overlapped_step(self.pricing, self._buckets(workload), compute_s)
        return {"after the backward pass": after.seconds, "under the backward pass": under.seconds}

    def _buckets(self, workload: Workload) -> list[Any]:
        return workload.buckets(self.options.bucket_cap_mb * 2**20, ITEMS[self.options.wire])

    def _jitter_record(self, workload: Workload, compute_s: float, exchange_s: float) -> dict[str, Any]:
        law = Jitter(compute_s, self.options.jitter or 0.0)
        times_s = law.sample(default_rng(self.options.seed), self.options.steps or JITTER_STEPS, self.options.ranks)
        if isinstance(self.algorithm, Gossip):
            ways = (replace(self.algorithm, staleness=late, weight=None) for late in (0, 1))
            now, late = (gossip_efficiency(times_s, way, exchange_s) for way in ways)
            return {"jitter": asdict(law), "efficiency_with_jitter": now, "efficiency_one_step_late": late}
        efficiency = mean_efficiency(self.pricing, self._buckets(workload), times_s)
        return {"jitter": asdict(law), "efficiency_with_jitter": efficiency}


def run(algorithm: Algorithm, options: ExchangeOptions, as_json: bool) -> None:
    """Print the estimate of an exchange; raises `UsageError`."""
    options.check()
    cluster = Cluster.named(options.cluster or CLUSTER)
    record = ExchangeEstimate(algorithm, options, cluster).record()
    if as_json:
        print(json_of(record))
        return
    optimal = "" if record["of_optimal"] is None else f", {record['of_optimal']:.2f}x of optimal"
    print(
        f"{record['algorithm']} on {record['ranks']:,} ranks of {cluster.name}: {record['nbytes'] / 1e6:,.1f} MB in "
        f"{record['steps']:,} steps and {1e3 * record['seconds']:.3f} ms (no schedule is below "
        f"{1e3 * record['lower_bound_seconds']:.3f} ms{optimal})"
    )
    if "coding_seconds" in record:
        print(quantizer_sentence(record["coding_seconds"], cluster))
    if "exchanges" in record:
        _show_steps(record)
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def quantizer_sentence(seconds: float, cluster: Cluster) -> str:
    """Return what of the price is for turning values into codes and back."""
    if cluster.code_gbytes_per_s is None:
        return f"quantizing is taken to need no time: {cluster.name} has no code_gbytes_per_s; commrt probe measures it"
    return f"{1e3 * seconds:.3f} ms of it is for turning values into codes and back"


def _show_steps(record: dict[str, Any]) -> None:
    title = f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to compute"
    table = Table("exchange", title=title)
    for column in ("step, ms", "not hidden, ms", "efficiency"):
        table.add_column(column, justify="right")
    for each in record["exchanges"]:
        times = (f"{1e3 * each[key]:.2f}" for key in ("step_seconds", "exposed_seconds"))
        table.add_row(each["when"], *times, f"{each['efficiency']:.1%}")
    Console().print(table)
    if "jitter" in record:
        late = record.get("efficiency_one_step_late")
        also = "" if late is None else f"; one step late {late:.1%}"
        variation = record["jitter"]["variation"]
        print(f"if computing varies by {variation:.0%}: efficiency {record['efficiency_with_jitter']:.1%}{also}")


Sampled = HeavyTails | Exponential | SlowSteps
LAWS: dict[str, Sampled] = {"paper": HeavyTails(), "exponential": Exponential(), "slow": SlowSteps()}
RANKS, STEPS, MOST_TIMES = 100, 10_000, 20_000_000
"""Defaults, and the most times of ranks in steps: they fit into memory several times over."""
FEW, GROWTH = 12, 1.25
"""Every number of backups up to the first is tried; after it, each one tried is so many times the one before."""
COLUMNS = {
    "quorum": "wait for",
    "backups": "backups",
    "kth_time_s": "step, s",  # mean, if all ranks begin each step together
    "hours": "hours",  # to the goal
    "relative_time": "time",  # to the goal, compared with waiting for all
    "late_finish_step_s": "step, s *",  # mean, if a late rank finishes its gradient before it goes on
    "late_finish_relative_time": "time *",
}
"""Titles of columns."""


@dataclass(frozen=True, eq=False)
class BackupEstimate:
    """What backup workers cost and save, for each quorum."""

    options: BackupOptions
    law: Sampled | Recorded
    goal: Published | Scaling
    times_s: Times
    choice: QuorumChoice

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.choice.kth_s)

    @cached_property
    def per_quorum(self) -> dict[str, PerRank]:
        """Return columns [ranks] for quorums of 1 to all ranks."""
        return {
            "kth_time_s": self.choice.kth_s,
            "hours": self.choice.goal_s * (1 / 3600 if self.goal.in_updates else np.nan),
            "relative_time": self.choice.goal_s / float(self.choice.goal_s[-1]),
        }

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a row by names of `COLUMNS` for each split that is tried, the one without backups last."""
        tried = {*range(FEW + 1), self.ranks - self.choice.best}
        while (larger := ceil(GROWTH * max(tried))) <= (self.ranks - 1) // 2:
            tried.add(larger)
        needed = np.array([self.ranks - backups for backups in sorted(tried, reverse=True) if backups < self.ranks])
        late_s = step_time_s(self.times_s, needed)
        late = late_s * self.goal.iterations(needed) / self.choice.goal_s[-1]
        known = [column[needed - 1] for column in self.per_quorum.values()]
        cells = [column.tolist() for column in (needed, self.ranks - needed, *known, late_s, late)]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*cells, strict=True)]

    @cached_property
    def best_if_late_finish(self) -> dict[str, Any]:
        """Return the row of the best quorum that backup workers may have, of those tried."""
        allowed = [row for row in self.rows if row["backups"] <= (self.ranks - 1) // 2]
        return min(reversed(allowed), key=lambda row: np.nan_to_num(row["late_finish_relative_time"], nan=inf))

    def record(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        choice = self.choice
        parameters = {"file": self.options.times} if isinstance(self.law, Recorded) else asdict(self.law)
        columns = {name: None if np.isnan(each).all() else each.tolist() for name, each in self.per_quorum.items()}
        return {
            "ranks": self.ranks,
            "steps": len(self.times_s),
            "seed": self.options.seed,
            "law": {"name": self.options.law_name} | parameters,
            "iterations": {"name": type(self.goal).__name__.lower()} | asdict(self.goal),
            "sources": self.sources(),
            "best_quorum": choice.best,
            "backups": self.ranks - choice.best,
            "likely_quorums": choice.likely,
            "best_quorum_if_late_finish": self.best_if_late_finish["quorum"],
            **columns,
            "table": self.rows,
        }

    def sources(self) -> str:
        """Return where times and numbers of updates come from."""
        fitted = ", a fit of ours to two percentages published for 100 machines, as recalled"
        times = f"sampled, {self.law}{fitted * (self.law == LAWS['paper'])}"
        if isinstance(self.law, Recorded):
            times = f"recorded, {self.options.times}"
        updates = "a line between Inception's with 50 and with 100 gradients each, published, as recalled"
        if isinstance(self.goal, Scaling):
            updates = f"assumed to fall as (gradients per update)^-{self.goal.exponent:g}"
        return f"times: {times}; updates: {updates}"


def estimate_backups(options: BackupOptions) -> BackupEstimate:
    """Read or sample times, then choose a quorum; raises `UsageError` if the options do not fit together."""
    rng = default_rng(options.seed)
    law = _sampled(options) if options.times is None else _recorded(options, options.times)
    if isinstance(law, Recorded):
        times_s = law.times_s
    else:
        ranks, steps = options.ranks or RANKS, options.steps or STEPS
        if ranks * steps > MOST_TIMES:
            most = MOST_TIMES // ranks
            raise UsageError(f"{steps:,} steps of {ranks:,} ranks are too many: give up to --steps {most}")
        times_s = law.sample(rng, steps, ranks)
    goal = _goal(options, times_s.shape[1])
    return BackupEstimate(options, law, goal, times_s, choose(times_s, goal, rng))


def _recorded(options: BackupOptions, file: str) -> Recorded:
    if options.law or options.parameters or options.steps:
        raise UsageError("--times replaces sampled times: leave out --law, --set and --steps")
    law = read_times(file)
    ranks = law.times_s.shape[1]
    if options.ranks not in {None, ranks}:
        raise UsageError(f"{file} holds times of {ranks} ranks, not of {options.ranks}: leave --ranks out")
    return law


def _sampled(options: BackupOptions) -> Sampled:
    law = LAWS[options.law_name]
    parameters = asdict(law)
    for text in options.parameters:
        name, _, number = text.partition("=")
        with suppress(ValueError):
            if name in parameters:
                parameters[name] = float(number)
                continue
        raise UsageError(f"--set {text}: write NAME=NUMBER, where NAME is one of {', '.join(parameters)}")
    return type(law)(**parameters)


def _goal(options: BackupOptions, ranks: int) -> Published | Scaling:
    """Return the published counts for the published law, unless --exponent is given."""
    if options.exponent is not None or options.law_name != "paper":
        return Scaling(1.0 if options.exponent is None else options.exponent)
    if np.isnan(Published().iterations(np.array([ranks]))[0]):
        raise UsageError(
            f"the published counts of updates are for 50 to 100 gradients each, and say nothing of {ranks} ranks: give "
            "--exponent, 1 if twice the batch halves the updates, 0 if it does not help"
        )
    return Published()


def run_backups(options: BackupOptions, as_json: bool) -> None:
    """Print what steps cost that wait for some of the ranks, and how many backups to use; raises `UsageError`."""
    found = estimate_backups(options)
    if as_json:
        print(json_of(found.record()))
        return
    rows, best = found.rows, found.best_if_late_finish
    table = Table(title=f"{found.ranks} ranks, {len(found.times_s):,} steps")
    shown = [name for name in COLUMNS if not all(isnan(row[name]) for row in rows)]
    for name in shown:
        table.add_column(COLUMNS[name], justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in shown), style="bold" if row is best else None)
    Console().print(table)
    print("time: to the goal, compared with waiting for all")
    print("*: if a late rank finishes its gradient before it goes on, as in commrt")
    print(found.sources())
    print(_advice(found, best))


def _cell(value: float) -> str:
    return "-" if isnan(value) else str(value) if isinstance(value, int) else f"{value:#.4g}"


def _advice(found: BackupEstimate, best: dict[str, Any]) -> str:
    """Return how many backups to use, and what the published rule says."""
    choice, (low, high) = found.choice, (found.ranks - quorum for quorum in reversed(found.choice.likely))
    return (
        f"use {best['backups']} backups: the goal takes {best['late_finish_relative_time']:.2f} of the time without\n"
        f"the published rule, by which all begin each step together, says {found.ranks - choice.best} ({low} to {high} "
        "in 90 % of resamplings)"
    )
