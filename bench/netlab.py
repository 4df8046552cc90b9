# SPDX-License-Identifier: Apache-2.0
"""Measure schedules beside Gloo's all-reduce on a cluster in one machine: ``sudo python bench/netlab.py``.

Needs Linux and iproute2. Hosts are namespaces whose links carry 200 Mbit/s each way (`network_hosts`). That network is
slow beside everything else, so the times depend on how often and over which links the bytes travel. The suite measures

* exchanges of 12.8 MB, interleaved, from a common start to the slowest rank's end,
* training steps that compute by sleeping: the mean time of a step over all ranks.

Each runs with equal links, and with the links of one host at a quarter of the rate (and a quarter of the bytes). Steps
also run with one host that computes twice as long.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import exchanges
import sleeping_steps
import torch
import torch.distributed as dist
from interleaved import Times, table
from network_hosts import Cabling, cluster, missing, output_of_first
from records import append, bus_bandwidth, made

import commrt

__all__ = ["Job", "Trial", "trials"]


@dataclass(frozen=True)
class Job:
    """The work of all ranks."""

    hosts: int
    per_host: int
    numel: int
    rounds: int
    steps: int = 0
    """Training steps in a row; 0 measures exchanges."""
    compute_s: float = 0.3
    slow_host: int | None = None
    """The host that computes twice as long, or None."""


@dataclass(frozen=True)
class Trial:
    """A case: the work of all ranks, the network, and the variant that others are compared with."""

    case: str
    job: Job
    cabling: Cabling
    peer: str

    def measured(self) -> Times:
        """Build the network, run the job, and remove the network."""
        job = self.job
        with cluster(self.cabling):
            said = output_of_first([__file__, "--work", json.dumps(asdict(job))], job.hosts, job.per_host)
        times: Times = json.loads(said)
        return times


def trials(exchanged: Job, stepped: Job, rate_mbit: float) -> list[Trial]:
    """Yield all cases."""
    even = Cabling(exchanged.hosts, rate_mbit)
    last = exchanged.hosts - 1
    uneven = replace(even, own_rate_mbit={last: rate_mbit / 4})
    gloo = f"{exchanges.GLOO}, fp32"
    return [
        Trial("exchange", exchanged, even, gloo),
        Trial("exchange, one link at a quarter", _of_a_quarter(exchanged), uneven, gloo),
        Trial("step", stepped, even, "ring"),
        Trial("step, one link at a quarter", _of_a_quarter(stepped), uneven, "ring"),
        Trial("step, one host computes twice as long", replace(stepped, slow_host=last), even, "ring"),
    ]


def _of_a_quarter(job: Job) -> Job:
    """Return the job with a quarter of the bytes, so that it takes as long on the slow link as elsewhere."""
    return replace(job, numel=job.numel // 4)


def work(job: Job) -> None:
    """Measure on one rank; rank 0 prints all times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with commrt.init(300.0) as world:
        times = _steps(job, world) if job.steps else _exchanges(job, world)
        gathered: list[Times] = [{} for _ in range(world.size)]
        dist.all_gather_object(gathered, times)
        if world.rank == 0:
            turns = {name: zip(*(one[name] for one in gathered), strict=True) for name in times}
            print(json.dumps({name: [mean(turn) for turn in each] for name, each in turns.items()}), flush=True)
    dist.destroy_process_group()


def _exchanges(job: Job, world: commrt.World) -> Times:
    ways = exchanges.exchanges(world, job.per_host, job.numel)
    for name, way in ways.items():
        way.check(name, world.rank)
    return in_turn(list(ways), job.rounds, lambda name: ways[name].seconds())


def _steps(job: Job, world: commrt.World) -> Times:
    compute_s = job.compute_s * (2 if world.rank // job.per_host == job.slow_host else 1)
    algorithms = sleeping_steps.algorithms(job.hosts, job.per_host)
    ways = {
        name: sleeping_steps.Training(world, algorithm, job.numel, compute_s) for name, algorithm in algorithms.items()
    }
    return in_turn(list(ways), job.rounds, lambda name: ways[name].seconds(job.steps))


def in_turn(names: Sequence[str], rounds: int, measure: Callable[[str], float]) -> Times:
    """Time all variants interleaved. Each round starts with another variant; the first round does not count."""
    times: Times = {name: [] for name in names}
    for turn in range(-1, rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            seconds = measure(name)
            times[name] += [seconds] * (turn >= 0)
    return times


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts")
    parser.add_argument("--per-host", type=int, default=2, help="ranks per host")
    parser.add_argument("--rate", type=float, default=200.0, help="rate of each link, in Mbit/s each way")
    parser.add_argument("--numel", type=int, default=3_200_000, help="elements of the buffer")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to measure")
    parser.add_argument("--only", default="", help="run only cases whose names begin with this")
    parser.add_argument("--records", type=Path, help="append records to this file, as JSON lines")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Job(**json.loads(options.work)))
        return
    if why := missing():
        sys.exit(f"nothing was measured: {why}")
    exchanged = Job(options.hosts, options.per_host, options.numel, options.rounds)
    stepped = replace(exchanged, steps=5, rounds=max(options.rounds // 2, 1))
    for trial in trials(exchanged, stepped, options.rate):
        if trial.case.startswith(options.only):
            show(trial, options.records, {"rate_mbit": options.rate, "hosts": options.hosts})


def show(trial: Trial, path: Path | None, facts: dict[str, Any]) -> None:
    """Measure, print and record a case."""
    job, times = trial.job, trial.measured()
    peers, nbytes = dict.fromkeys(times, trial.peer), 4 * job.numel
    print(f"\n{trial.case}\n{table(times, peers)}", flush=True)
    bus = bus_bandwidth(nbytes, job.hosts * job.per_host)

    def figures(variant: str, seconds: float) -> dict[str, float]:
        return {} if job.steps or "gossip" in variant else bus(variant, seconds)

    append(path, made("netlab", trial.case, times, peers, figures, nbytes=nbytes, **facts))


if __name__ == "__main__":
    main()
