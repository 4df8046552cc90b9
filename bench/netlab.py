# SPDX-License-Identifier: Apache-2.0
"""Measure schedules beside Gloo's all-reduce on a cluster in one machine: ``sudo python bench/netlab.py``.

Needs Linux and iproute2. Hosts are namespaces whose links carry 200 Mbit/s each way (`network_hosts`). That network is
slow beside everything else, so the times depend on how often and over which links the bytes travel. The suite measures

* exchanges of 12.8 MB, interleaved, from a common start to the slowest rank's end; with a 16-bit wire, commrt packs and
  unpacks as a bucket does, and Gloo casts; codes travel by `World.all_reduce`,
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
from time import perf_counter
from typing import Any

import sleeping_steps
import torch
import torch.distributed as dist
from interleaved import Times, table
from network_hosts import Cabling, cluster, missing, output_of_first
from records import append, bus_bandwidth, made
from torch import Tensor

import commrt
from commrt.algorithm import Algorithm
from commrt.kernels import dispatch
from commrt.kernels.layout import layout_of
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.schedule import ADD, COPY, Schedule
from commrt.transport.protocol import Tag

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTIZERS = (commrt.Int8(), commrt.Int4(), commrt.Int2())
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, QUANTIZERS[0]: 1e-2, QUANTIZERS[1]: 0.1, QUANTIZERS[2]: 0.5}
GLOO = "Gloo all_reduce"
GOSSIPED = 3
"""Steps of gossip that are measured: partners at all distances."""


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
    gloo = f"{GLOO}, fp32"
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
    ways = exchanges(world, job.per_host, job.numel)
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


def exchanged_algorithms(hosts: int, per_host: int) -> dict[str, Algorithm]:
    """Return all-reduces and gossip, by name."""
    return {
        "ring": commrt.Ring(),
        "halving_doubling": commrt.HalvingDoubling(),
        "torus2d": commrt.Torus2D((per_host, hosts)),
        "gossip": commrt.Gossip(),
        "hierarchical gossip": commrt.Gossip(within=per_host),
    }


@dataclass(frozen=True)
class Exchange:
    """A way to exchange. Rank r begins with r + 1 times a pattern in `data` [numel], and ends with a multiple of it."""

    data: Tensor
    run: Callable[[int], object]
    """Runs one step."""
    factors: Sequence[float]
    """One factor for each step, as partners of gossip change."""
    wire: torch.dtype | commrt.quantization.Quantizer

    def check(self, name: str, rank: int) -> None:
        """Raise `RuntimeError` if the result is wrong."""
        pattern = torch.linspace(0.5, 1.5, len(self.data))
        for step, factor in enumerate(self.factors):
            self.data.copy_((rank + 1) * pattern)
            self.run(step)
            error = ((self.data - factor * pattern).norm() / pattern.norm()).item() / factor
            if not error <= TOLERANCE[self.wire]:  # also true for NaN
                raise RuntimeError(f"{name} is off by {error:.1e} on rank {rank}: nothing was measured")

    def seconds(self) -> float:
        """Return the mean seconds of a step, from a common start to the slowest rank's end."""
        spent_s = torch.zeros(len(self.factors), dtype=torch.float64)
        for step in range(len(self.factors)):
            self.data.fill_(1.0)
            dist.barrier()
            begin_s = perf_counter()
            self.run(step)
            spent_s[step] = perf_counter() - begin_s
        dist.all_reduce(spent_s, dist.ReduceOp.MAX)
        return float(spent_s.mean())


def exchanges(world: commrt.World, per_host: int, numel: int) -> dict[str, Exchange]:
    """Return all exchanges, by name."""
    everybody = world.size * (world.size + 1) / 2
    found = {}
    for wire, dtype in WIRES.items():
        found[f"{GLOO}, {wire}"] = gloo(torch.zeros(numel), everybody, dtype)
        for name, algorithm in exchanged_algorithms(world.size // per_host, per_host).items():
            steps = GOSSIPED if isinstance(algorithm, commrt.Gossip) else 1
            schedules = [algorithm.schedule(step, world.size) for step in range(steps)]
            data = world.transport.allocate(numel, torch.float32)  # as wire buffers are
            found[f"{name}, {wire}"] = scheduled(world, schedules, data, dtype)
    return found | {
        f"direct within, {quantizer}": quantized(world, per_host, numel, quantizer) for quantizer in QUANTIZERS
    }


def quantized(world: commrt.World, per_host: int, numel: int, quantizer: commrt.quantization.Quantizer) -> Exchange:
    """Return the exchange of codes: the ranks of a host sum among themselves first."""
    data = torch.zeros(numel)
    residual = torch.zeros(numel) if quantizer.feedback else None
    algorithm = commrt.Direct(within=per_host)

    def run(_: int) -> None:
        world.all_reduce(data, "sum", algorithm=algorithm, wire=quantizer, residual=residual)

    return Exchange(data, run, [world.size * (world.size + 1) / 2], quantizer)


def gloo(data: Tensor, factor: float, dtype: torch.dtype) -> Exchange:
    """Return the exchange by Gloo's all-reduce."""

    def run(_: int) -> None:
        wire = data.to(dtype)  # the same tensor, where it has that dtype
        dist.all_reduce(wire)
        if wire is not data:
            data.copy_(wire)

    return Exchange(data, run, [factor], dtype)


def scheduled(world: commrt.World, schedules: Sequence[Schedule], data: Tensor, dtype: torch.dtype) -> Exchange:
    """Return the exchange by commrt's schedules."""
    factors = [_factor(schedule, world.rank) for schedule in schedules]
    layout = layout_of([len(data)])
    wire = data if dtype == data.dtype else world.transport.allocate(layout.numel, dtype)
    bounds = [bind(program(schedule, world.rank), wire, world.transport) for schedule in schedules]

    def exchange(step: int) -> None:
        world.comm_thread.submit(lambda: bounds[step].run(Tag(step, "netlab"))).result()

    if wire is data:
        return Exchange(data, exchange, factors, dtype)
    packing = dispatch.packing(wire, layout, [data])

    def packed(step: int) -> None:
        packing.pack([data], 1.0, 1)
        exchange(step)
        packing.unpack([data], 1)

    return Exchange(data, packed, factors, dtype)


def _factor(schedule: Schedule, rank: int) -> float:
    found = replayed(schedule)[rank].unique()
    if len(found) > 1:
        raise RuntimeError(f"{schedule.name} does other things to other chunks: {found.tolist()}")
    return float(found)


def replayed(schedule: Schedule) -> Tensor:
    """Return the buffers [ranks, chunks] that held 1, 2, 3, ... after the schedule.

    >>> replayed(commrt.Ring().schedule(0, 3)).tolist()
    [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]
    """
    state = torch.arange(1.0, schedule.ranks + 1)[:, None].repeat(1, schedule.chunks)
    for step in schedule.steps():
        before = state.clone()
        columns = (step.src, step.dst, step.lo, step.hi, step.combine, step.weight)
        for src, dst, lo, hi, combine, weight in zip(*columns, strict=True):
            came, own = before[src, lo:hi], state[dst, lo:hi]
            if combine == COPY:
                own.copy_(came)
            else:
                own += came if combine == ADD else weight * (came - own)
    return state


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
