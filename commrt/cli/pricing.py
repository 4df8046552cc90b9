# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate`` of an exchange, and of a training step with it, on a described cluster. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from commrt.algorithms.gossip import Gossip
from commrt.cli.outputs import json_of
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.pricing.coupling import gossip_efficiency
from commrt.pricing.planning import ITEM_NBYTES
from commrt.pricing.simulate import Price, Pricing, all_reduce_bound_s, exchange_bound_s
from commrt.pricing.stragglers import Jitter
from commrt.pricing.timeline import blocking_step, mean_efficiency, overlapped_step
from commrt.pricing.workload import FORWARD, Workload
from commrt.schedule import Algorithm

__all__ = ["CLUSTER", "Case", "Estimate", "compute_of", "run", "workload_of"]

RESNET50 = "resnet50"
BATCH = 32
MOST = 1e9
"""Of milliseconds, and of what a computing time varies by."""
CLUSTER = "abci"
STEPS = 50
MOST_PARAMETERS = 10**15
MOST_NBYTES = 1e18
MOST_TIMES = 10_000_000
"""Of ranks in steps that vary: each step is played."""


@dataclass(frozen=True, slots=True)
class Case:
    """The options as given; None where one was left out."""

    ranks: int = 4
    cluster: str | None = None
    nbytes: float | None = None
    model: str | None = None
    wire: str = "fp32"
    bucket_cap_mb: float = 25.0
    batch: int | None = None
    compute_ms: float | None = None
    jitter: float | None = None
    steps: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise `UsageError` for options that do not fit together."""
        if (self.nbytes is None) == (self.model is None):
            raise UsageError("say what is exchanged: --nbytes for a buffer, or --model for a model's gradients")
        of_a_step = {"--batch": self.batch, "--compute-ms": self.compute_ms, "--jitter": self.jitter}
        if self.model is None and (given := [name for name, value in of_a_step.items() if value is not None]):
            raise UsageError(f"{given[0]} is of a training step: give --model too")
        self.check_numbers()
        if self.batch is not None and self.compute_ms is not None:
            raise UsageError("--batch and --compute-ms both say how long a step computes: leave one out")

    def check_numbers(self) -> None:
        """Raise `UsageError` for those that cannot be computed with."""
        for name, value in {"--compute-ms": self.compute_ms, "--jitter": self.jitter}.items():
            if value is not None and not 0 <= value < MOST:
                raise UsageError(f"{name} {value:g}: give a number from 0 to {MOST:g}")
        if not 0 < self.bucket_cap_mb < MOST:
            raise UsageError(f"--bucket-cap-mb {self.bucket_cap_mb:g}: give a number above 0, up to {MOST:g}")
        if self.nbytes is not None and not 0 <= self.nbytes < MOST_NBYTES:
            raise UsageError(f"--nbytes {self.nbytes:g}: give a number from 0 to {MOST_NBYTES:g}")
        steps, most = self.steps or STEPS, MOST_TIMES // self.ranks
        if steps > most:
            raise UsageError(f"{steps:,} steps of {self.ranks:,} ranks are too many: give up to --steps {most}")


@dataclass(frozen=True)
class Estimate:
    """Of one algorithm in one case."""

    algorithm: Algorithm
    case: Case
    cluster: Cluster

    @cached_property
    def pricing(self) -> Pricing:
        """Of its schedule in the first step."""
        return Pricing(self.algorithm.schedule(0, self.case.ranks), self.cluster)

    def price(self) -> Price:
        """Of all bytes at once; for gossip, which has other partners in other steps, the mean of two periods."""
        first = self.pricing.price(self.nbytes)
        if not isinstance(self.algorithm, Gossip):
            return first
        steps = range(1, 2 * self.algorithm.period(self.case.ranks))
        others = (Pricing(self.algorithm.schedule(step, self.case.ranks), self.cluster) for step in steps)
        finish_s = [first.finish_s, *(other.price(self.nbytes).finish_s for other in others)]
        return Price(np.full(self.case.ranks, np.mean([each.max() for each in finish_s])), first.steps)

    @cached_property
    def workload(self) -> Workload | None:
        """What is trained, if it was said."""
        return None if self.case.model is None else workload_of(self.case.model)

    @property
    def nbytes(self) -> float:
        """That each rank contributes."""
        if self.workload is None:
            return self.case.nbytes or 0.0
        return float(self.workload.numel * ITEM_NBYTES[self.case.wire])

    @property
    def bound_s(self) -> float:
        """What no schedule can beat."""
        bound = exchange_bound_s if isinstance(self.algorithm, Gossip) else all_reduce_bound_s
        return bound(self.cluster, self.case.ranks, self.nbytes)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        price = self.price()
        known: dict[str, Any] = {
            "algorithm": str(self.algorithm),
            "ranks": self.case.ranks,
            "cluster": self.cluster.name,
            "nbytes": self.nbytes,
            "seconds": price.seconds,
            "lower_bound_seconds": self.bound_s,
            "of_optimal": price.seconds / self.bound_s if self.bound_s else None,
            "steps": price.steps,
        }
        return known if self.workload is None else known | self._of_a_step(self.workload, price.seconds)

    def _of_a_step(self, workload: Workload, exchange_s: float) -> dict[str, Any]:
        compute_s, rate = compute_of(self.case, workload, self.cluster)
        steps = self._steps(workload, compute_s, exchange_s)
        found = {
            "model": workload.name,
            "wire": self.case.wire,
            "compute_seconds": compute_s,
            "exchanges": steps,
            "images_per_second": None if rate is None else rate * self.case.ranks * max(map(_efficiency, steps[:2])),
        }
        return found if self.case.jitter is None else found | self._with_jitter(workload, compute_s, exchange_s)

    def _steps(self, workload: Workload, compute_s: float, exchange_s: float) -> list[dict[str, Any]]:
        """The ways to have the exchange in a step."""
        if isinstance(self.algorithm, Gossip):  # of weights, which are there when a step is done
            rest_s = (1 - FORWARD) * compute_s
            ends = {
                "after the step": compute_s + exchange_s,
                "under the next forward pass": rest_s + max(compute_s - rest_s, exchange_s),
                "a step late, under all of it": max(compute_s, exchange_s),
            }
        else:
            after = blocking_step(self.pricing, self.nbytes, compute_s)
            under = overlapped_step(self.pricing, self._buckets(workload), compute_s)
            ends = {"after the backward pass": after.seconds, "under the backward pass": under.seconds}
        return [_told(when, step_s, compute_s) for when, step_s in ends.items()]

    def _buckets(self, workload: Workload) -> list[Any]:
        return workload.buckets(self.case.bucket_cap_mb * 2**20, ITEM_NBYTES[self.case.wire])

    def _with_jitter(self, workload: Workload, compute_s: float, exchange_s: float) -> dict[str, Any]:
        law = Jitter(compute_s, self.case.jitter or 0.0)
        times_s = law.sample(np.random.default_rng(self.case.seed), self.case.steps or STEPS, self.case.ranks)
        if isinstance(self.algorithm, Gossip):
            ways = {late: replace(self.algorithm, staleness=late, weight=None) for late in (0, 1)}
            found = {late: gossip_efficiency(times_s, way, exchange_s) for late, way in ways.items()}
            return {"jitter": asdict(law), "efficiency_with_jitter": found[0], "efficiency_one_step_late": found[1]}
        efficiency = mean_efficiency(self.pricing, self._buckets(workload), times_s)
        return {"jitter": asdict(law), "efficiency_with_jitter": efficiency}


def _efficiency(step: dict[str, Any]) -> float:
    return float(step["efficiency"])


def _told(when: str, step_s: float, compute_s: float) -> dict[str, Any]:
    return {
        "when": when,
        "step_seconds": step_s,
        "exposed_seconds": step_s - compute_s,
        "efficiency": compute_s / step_s,
    }


def compute_of(case: Case, workload: Workload, cluster: Cluster) -> tuple[float, float | None]:
    """How long a step computes, and images per second and rank; raises `UsageError` where that is not known."""
    if case.compute_ms is not None:
        return case.compute_ms / 1e3, None
    if workload.name not in cluster.compute:
        raise UsageError(
            f"how long a step of {workload.name} computes on {cluster.name} is not known: give --compute-ms"
        )
    rate = cluster.compute[workload.name]
    return (case.batch or BATCH) / rate, rate


def workload_of(model: str) -> Workload:
    """What --model says; raises `UsageError`."""
    if model == RESNET50:
        return Workload.resnet50()
    try:
        numel = int(float(model))
    except (ValueError, OverflowError):
        numel = 0
    if not 0 < numel <= MOST_PARAMETERS:
        raise UsageError(f"--model {model}: give {RESNET50}, or a number of parameters, such as 25.6e6")
    return Workload.even(numel, parts=min(numel, 100))


def run(algorithm: Algorithm, case: Case, as_json: bool) -> None:
    """Print the estimate; raises `UsageError`."""
    case.check()
    estimate = Estimate(algorithm, case, Cluster.named(case.cluster or CLUSTER))
    record = estimate.record()
    if as_json:
        print(json_of(record))
    else:
        _show(record, estimate.cluster)


def _show(record: dict[str, Any], cluster: Cluster) -> None:
    optimal = "" if record["of_optimal"] is None else f", {record['of_optimal']:.2f}x of optimal"
    print(
        f"{record['algorithm']} on {record['ranks']:,} ranks of {cluster.name}: {record['nbytes'] / 1e6:,.1f} MB in "
        f"{record['steps']:,} steps and {1e3 * record['seconds']:.3f} ms (no schedule is below "
        f"{1e3 * record['lower_bound_seconds']:.3f} ms{optimal})"
    )
    if "exchanges" in record:
        _show_steps(record)
    print(f"{cluster.name}: {' '.join(cluster.about.split())}")


def _show_steps(record: dict[str, Any]) -> None:
    table = Table(
        title=f"{record['model']}, {record['wire']} wire, {1e3 * record['compute_seconds']:.2f} ms to compute"
    )
    for title in ("exchange", "step, ms", "not hidden, ms", "efficiency"):
        table.add_column(title, justify="left" if title == "exchange" else "right")
    for each in record["exchanges"]:
        times = (f"{1e3 * each[key]:.2f}" for key in ("step_seconds", "exposed_seconds"))
        table.add_row(each["when"], *times, f"{each['efficiency']:.1%}")
    Console().print(table)
    if "jitter" in record:
        late = record.get("efficiency_one_step_late")
        also = "" if late is None else f"; one step late {late:.1%}"
        variation = record["jitter"]["variation"]
        print(f"where computing varies by {variation:.0%}: efficiency {record['efficiency_with_jitter']:.1%}{also}")
