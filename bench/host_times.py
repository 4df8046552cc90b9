# SPDX-License-Identifier: Apache-2.0
"""Measure the host's time where nothing moves: ``python bench/host_times.py --run --step --gossip 8 256 1024``.

One rank runs alone, as one of several, over a transport that moves nothing, so what is left is commrt's own work.

- `--run`: `World.run` and `World.all_reduce` on a ring of two, beside the bound program's own `run`;
- `--step`: a synchronous step of 161 gradients in 5 buckets, besides the backward pass and the optimizer themselves;
- `--gossip`: the same of a step of gossip in two buckets, as one of so many ranks.

Cells are CPU times in microseconds: medians, and in brackets the 20th and the 80th percentile.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import process_time, thread_time
from unittest import mock

import torch
from interleaved import Times, table
from torch import nn
from torch.distributed import HashStore

import commrt
from commrt.program import program
from commrt.runtime.comparison import ConsistencyCheck
from commrt.runtime.executor import bind
from commrt.transport.protocol import Tag

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
from host_calls import Mirror, Null, agreed

TAG = Tag(0, 0)
SIZES = {"256 B": 64, "256 KB": 1 << 16, "4 MB": 1 << 20}
"""Elements of fp32."""
BOUND, ON_THREAD, RUN, SUM = "bound run", "comm_thread.run", "World.run", "World.all_reduce"
NUMEL, WARMUP, STEPS = 64, 20, 240
GOSSIPS: dict[str, Callable[[], commrt.Algorithm]] = {
    "gossip": commrt.Gossip,
    "gossip, rotate=False": lambda: commrt.Gossip(rotate=False),
    "gossip of gradients": lambda: commrt.Gossip(payload="gradients"),
}


def calls(world: commrt.World, numel: int) -> dict[str, Callable[[], object]]:
    """Return what `--run` measures, on a buffer of `numel` elements."""
    ring, buffer, row = commrt.Ring(), torch.zeros(numel), torch.zeros(numel)
    schedule = ring.schedule(0, 2)
    run = partial(bind(program(schedule, 0), buffer, world.transport, bounds=[0, numel // 2, numel]).run, TAG)
    return {
        BOUND: run,
        ON_THREAD: lambda: world.comm_thread.run(run).result(),
        RUN: lambda: world.run(schedule, buffer),
        SUM: lambda: world.all_reduce(row, "sum", algorithm=ring),
    }


def in_turns(variants: dict[str, Callable[[], object]], rounds: int, turn_s: float) -> Times:
    """Return the process's seconds for a call of each variant in each round; each round begins with another one."""
    times: Times = {name: [] for name in variants}
    names = list(variants)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            count, begin_s = 0, process_time()
            while (elapsed_s := process_time() - begin_s) < turn_s or not count:
                for _ in range(20):
                    variants[name]()
                count += 20
            times[name] += [elapsed_s / count] if number >= 0 else []
    return times


class Loop:
    """A training loop, with commrt if there is an algorithm."""

    def __init__(self, world: commrt.World, algorithm: commrt.Algorithm | None, tensors: int, buckets: int) -> None:
        self.world = world
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(NUMEL)) for _ in range(tensors)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        if algorithm is not None:
            cap_mb = 4 * tensors * NUMEL / buckets / 2**20 * 1.02
            commrt.attach(self.model, self.optimizer, algorithm, world=world, bucket_cap_mb=cap_mb)

    def step(self) -> tuple[float, float]:
        """Return the seconds of CPU that a step took on this thread and on that of communication."""
        loss, before_s = torch.stack([param.sum() for param in self.model]).sum(), self._on_comm_thread()
        begin_s = thread_time()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end_s = thread_time()
        return end_s - begin_s, self._on_comm_thread() - before_s

    def _on_comm_thread(self) -> float:
        return self.world.comm_thread.submit(thread_time).result()


def row_of(transport: Null, make: Callable[[], commrt.Algorithm], tensors: int, buckets: int) -> list[str]:
    """Return what a step of an algorithm takes on both threads, and together, less that of the same loop without."""
    with commrt.World(transport, HashStore(), transport.rank) as world:
        plain, ours = Loop(world, None, tensors, buckets), Loop(world, make(), tensors, buckets)
        for loop in WARMUP * (plain, ours):
            loop.step()
        pairs = [(plain.step(), ours.step()) for _ in range(STEPS)]
    bare, whole = ([one[which] for one in pairs] for which in (0, 1))
    here, there = ([step[thread] for step in whole] for thread in (0, 1))
    less_here, less_there = (median(step[thread] for step in bare) for thread in (0, 1))
    both = [sum(step) for step in whole]
    return [cell(here, less_here), cell(there, less_there), cell(both, less_here + less_there)]


def cell(times_s: Sequence[float], less_s: float) -> str:
    """Return median, 20th and 80th percentile of `times_s` in us, each without `less_s`."""
    fifths = quantiles(times_s, n=5)
    middle, low, high = (f"{1e6 * max(each - less_s, 0.0):.0f}" for each in (median(times_s), fifths[0], fifths[-1]))
    return f"{middle} ({low}, {high})"


def steps(counts: Sequence[int], *, with_synchronous: bool) -> Iterator[list[str]]:
    """Yield the rows of `--step` and `--gossip`."""
    yield ["a step of", "ranks", "training thread, us", "communication thread, us", "both, us"]
    if with_synchronous:
        yield ["ring, 161 gradients, 5 buckets", "2", *row_of(Null(0, 2), commrt.Ring, 161, 5)]
    for name, make in GOSSIPS.items():
        for ranks in counts:
            yield [name, str(ranks), *row_of(Mirror(3, ranks), make, 16, 2)]


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="World.run and World.all_reduce")
    parser.add_argument("--step", action="store_true", help="a synchronous step")
    parser.add_argument("--gossip", type=int, nargs="+", metavar="RANKS", help="a step of gossip among so many ranks")
    parser.add_argument("--rounds", type=int, default=40, help="of --run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    with mock.patch.object(ConsistencyCheck, "_gather", agreed):
        if options.run:
            with commrt.World(Null(0, 2), HashStore()) as world:
                for size, numel in SIZES.items():
                    times = in_turns(calls(world, numel), options.rounds, 0.01)
                    sys.stdout.write(
                        f"{size}\n{table(times, dict.fromkeys((BOUND, ON_THREAD, RUN, SUM), BOUND), 'us')}\n\n"
                    )
        if options.step or options.gossip:
            rows = [*steps(options.gossip or (), with_synchronous=options.step)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                sys.stdout.write("  ".join(map(str.ljust, row, widths)).rstrip() + "\n")


if __name__ == "__main__":
    main()
