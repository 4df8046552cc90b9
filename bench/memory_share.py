# SPDX-License-Identifier: Apache-2.0
"""Measure how near all-reduces within a host come to the memory's speed: ``python bench/memory_share.py``.

Four processes add up ResNet-50's gradients in buckets of 25 MiB, without a backward pass. Beside each schedule they
copy as many bytes as it reads and writes, from private memory to private memory, also all at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from interleaved import Times, table
from model_gradients import resnet50
from records import append, made
from step_worker import HOST, Job, world_over
from torch import nn
from torch.multiprocessing import spawn

import commrt
from commrt.buckets.gradient_bucket import build_buckets
from commrt.buckets.layout import MIB
from commrt.program import Program, program
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.transport.protocol import Tag

SCHEDULES: dict[str, commrt.Algorithm] = {
    "direct": commrt.Direct(),
    "torus2d": commrt.Torus2D(),
    "halving_doubling": commrt.HalvingDoubling(),
    "ring": commrt.Ring(),
}
PEERS = {name: f"a copy of the bytes of {name}" for name in SCHEDULES}


def touched_chunks(mine: Program) -> int:
    """Return how many chunks a rank reads and writes, its own and those of its peers.

    >>> touched_chunks(program(commrt.Direct().schedule(0, 4), 0))  # (3 - 1/4) of the buffer
    11
    """
    chunks = 0
    for hop in mine.hops:
        spans = {(each.lo, each.hi) for each in hop.combined}
        chunks += sum(each.hi - each.lo for each in hop.combined) + sum(2 * (hi - lo) for lo, hi in spans)
        copied = [each for each in hop.recvs if each not in hop.combined]
        chunks += sum(2 * (each.hi - each.lo) for each in copied)
    return chunks


def work(rank: int, job: Job, answers: SimpleQueue) -> None:
    """Run the job as `rank`; rank 0 puts the times, each the slowest rank's, on `answers`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://{HOST}:{job.port}", rank=rank, world_size=job.ranks)
    with world_over("shared", rank, job.ranks) as world:
        ways = dict(pair for name in SCHEDULES for pair in contenders(name, world).items())
        times = measure(ways, job)
        gathered: list[Times] = [{} for _ in range(job.ranks)]
        dist.all_gather_object(gathered, times)
    dist.destroy_process_group()
    if rank == 0:
        answers.put({name: [max(turn) for turn in zip(*(g[name] for g in gathered), strict=True)] for name in times})


def contenders(name: str, world: World) -> dict[str, Callable[[], object]]:
    """Return the schedule `name`, and a copy of as many bytes."""
    params = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(resnet50().values())][::-1]
    wires = [bucket.wire for bucket in build_buckets(params, None, 25 * MIB, allocate=world.transport.allocate)]
    mine = program(SCHEDULES[name].schedule(0, world.size), world.rank)
    bound = [bind(mine, wire.fill_(1.0), world.transport) for wire in wires]
    copied = sum(wire.numel() for wire in wires) * touched_chunks(mine) // mine.chunks // 2
    source, target = torch.zeros(copied), torch.zeros(copied)

    def exchange() -> None:
        for number, each in enumerate(bound):
            each.run(Tag(0, number))

    return {
        name: lambda: world.comm_thread.submit(exchange).result(),
        PEERS[name]: partial(target.copy_, source),
    }


def measure(ways: dict[str, Callable[[], object]], job: Job) -> Times:
    """Time the ways interleaved; each round starts with another one."""
    names = list(ways)
    times: Times = {name: [] for name in names}
    for turn in range(-job.warmup, job.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            begin_s = perf_counter()
            ways[name]()
            times[name] += [perf_counter() - begin_s] * (turn >= 0)
    return times


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--records", type=Path, help="append records to this file, as JSON lines")
    options = parser.parse_args()
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.create_server((HOST, 0)) as server:
        job = Job(server.getsockname()[1], rounds=options.rounds)
    spawn(work, (job, answers), nprocs=job.ranks)
    times = answers.get()
    print(table(times, PEERS))
    append(options.records, made("memory share", f"{job.ranks} processes", times, PEERS))


if __name__ == "__main__":
    main()
