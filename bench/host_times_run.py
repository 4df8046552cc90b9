# SPDX-License-Identifier: Apache-2.0
"""Measure what `World.run` and `World.all_reduce` cost the host: ``python bench/host_times_run.py``.

A ring of two ranks runs over a transport that moves nothing, so what is left is Python and the additions. In each round
all variants take a turn, beside the bound program's own `run`. The command prints the CPU time of the process, in
medians with the 20th and 80th percentiles.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from time import process_time

import torch
from interleaved import Times, table
from null_transport import NullTransport
from torch.distributed import HashStore

import commrt
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.transport.protocol import Tag

TAG = Tag(0, 0)
SIZES = {"256 B": 64, "256 KB": 1 << 16, "4 MB": 1 << 20}
"""Elements of fp32."""
BOUND, ON_THREAD, RUN, SUM = "bound run", "comm_thread.run", "World.run", "World.all_reduce"


def world_alone() -> commrt.World:
    """Return the world of rank 0 of two, whose other rank makes every call that this one makes."""
    world = commrt.World(NullTransport(0, 2), HashStore())
    world.consistency._gather = lambda claim, ranks, *_: dict.fromkeys(ranks, claim)
    return world


def variants(world: commrt.World, numel: int) -> dict[str, Callable[[], object]]:
    """Return what is measured, on a buffer of `numel` elements."""
    ring, buffer, tensor = commrt.Ring(), torch.zeros(numel), torch.zeros(numel)
    schedule = ring.schedule(0, 2)
    bound = bind(program(schedule, 0), buffer, world.transport, bounds=[0, numel // 2, numel])
    run = partial(bound.run, TAG)
    return {
        BOUND: run,
        ON_THREAD: lambda: world.comm_thread.run(run).result(),
        RUN: lambda: world.run(schedule, buffer),
        SUM: lambda: world.all_reduce(tensor, "sum", algorithm=ring),
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int, turn_s: float) -> Times:
    """Return the seconds of a call of each variant in each round; each round begins with another one."""
    times: Times = {name: [] for name in calls}
    names = list(calls)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            count, begin_s = 0, process_time()
            while (elapsed_s := process_time() - begin_s) < turn_s or not count:
                for _ in range(20):
                    calls[name]()
                count += 20
            times[name] += [elapsed_s / count] if number >= 0 else []
    return times


def main() -> None:
    """Measure, and print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turn-s", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    with world_alone() as world:
        for size, numel in SIZES.items():
            times = measure(variants(world, numel), options.rounds, options.turn_s)
            sys.stdout.write(f"{size}\n{table(times, dict.fromkeys((BOUND, ON_THREAD, RUN, SUM), BOUND), 'us')}\n\n")


if __name__ == "__main__":
    main()
