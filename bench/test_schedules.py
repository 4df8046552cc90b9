# SPDX-License-Identifier: Apache-2.0
"""Measure what a schedule costs: building all steps, proving it, finding and binding one rank's part, pricing.

A schedule that is not correct ends the run. Proofs go up to 1,024 ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Keep
from host_times import Null
from interleaved import spread
from records import provenance

from commrt.algorithms.catalogue import ALGORITHMS, DIRECT
from commrt.algorithms.direct import MOST_RANKS
from commrt.kernels.layout import GRANULE
from commrt.pricing.cluster import Between, Cluster, Link
from commrt.pricing.price import Pricing
from commrt.program import program
from commrt.proof.replay import verify
from commrt.proof.spec import all_reduce
from commrt.runtime.executor import bind
from commrt.schedule import Schedule

RANKS = (64, 256, 1024, 4096)
MOST_PROVEN = 1024
ROUNDS = 3
FLAT = Cluster("flat", "", 1, Link(10.0, 10.0), Between(10.0, 10.0))


def build(schedule: Schedule) -> Callable[[], object]:
    """Return a task that builds all columns of all steps."""
    return lambda: sum(1 for _ in schedule.steps())


def prove(schedule: Schedule) -> Callable[[], object]:
    """Return a task that proves the schedule for all ranks."""
    spec = all_reduce(schedule.ranks, schedule.chunks)

    def proven() -> None:
        if not verify(schedule, spec).ok:
            raise RuntimeError(f"{schedule.name} is wrong: nothing was measured")

    return proven


def find(schedule: Schedule) -> Callable[[], object]:
    """Return a task that finds one rank's program."""
    return lambda: program(schedule, 0)


def bound(schedule: Schedule) -> Callable[[], object]:
    """Return a task that binds one rank's program to the smallest buffer without an empty chunk."""
    mine = program(schedule, 0)
    buffer, transport = torch.zeros(mine.chunks * GRANULE), Null(0, schedule.ranks)
    return lambda: bind(mine, buffer, transport)


def price(schedule: Schedule) -> Callable[[], object]:
    """Return a task that prices the schedule on a network with equal distances."""
    return lambda: Pricing(schedule, FLAT).price(1e8)


TASKS = {"build": build, "verify": prove, "program": find, "bind": bound, "simulate": price}
CASES = [
    (task, name, ranks)
    for ranks in RANKS
    for name in ALGORITHMS
    for task in TASKS
    if ranks <= {"verify": MOST_PROVEN}.get(task, ranks) and ranks <= {DIRECT: MOST_RANKS}.get(name, ranks)
]


@pytest.mark.benchmark(group="schedules")
@pytest.mark.parametrize(("task", "name", "ranks"), CASES)
def test_prepare_a_schedule(benchmark, task: str, name: str, ranks: int, keep: Keep):
    work = TASKS[task](ALGORITHMS[name]().schedule(0, ranks))
    benchmark.pedantic(work, rounds=ROUNDS)
    if benchmark.stats:  # None under --benchmark-disable
        low, middle, high = spread(benchmark.stats.stats.data)
        seconds = {"rounds": ROUNDS, "quantile20_s": low, "median_s": middle, "quantile80_s": high}
        about = {"suite": "schedules", "case": task, "variant": f"{name}, {ranks:,} ranks"}
        keep([{**about, **seconds, **provenance()}])
