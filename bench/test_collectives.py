# SPDX-License-Identifier: Apache-2.0
"""Measure torch.distributed's collectives on 4 processes of this machine: the backend commrt beside Gloo.

Both run interleaved in one job. A turn makes calls one after the other, as programs do, and gives the mean time of a
call on the slowest rank. Read ratios, not milliseconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from time import perf_counter

import pytest
import torch
import torch.distributed as dist
from interleaved import Clock, Times, record, table
from records import append, made
from step_worker import HOST
from torch.distributed import ProcessGroup
from torch.multiprocessing import spawn

import commrt.c10d as backend

SIZES = {"8 B": 8, "4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
"""Bytes of the largest tensor of a call."""
BACKENDS = (backend.NAME, "gloo")
Collective = Callable[[ProcessGroup], object]


@dataclass(frozen=True)
class CollectivesJob:
    """The settings of a run, for all ranks."""

    port: int
    ranks: int = 4
    warmup: int = 1
    rounds: int = 12
    nbytes_per_turn: int = 16 << 20
    calls_per_turn: int = 20

    def calls(self, nbytes: int) -> int:
        """Return how many calls make a turn."""
        return max(1, min(self.calls_per_turn, self.nbytes_per_turn // nbytes))


def all_reduce(nbytes: int, _: int) -> Collective:
    """Return the sum of a tensor."""
    tensor = torch.zeros(nbytes // 4)
    return lambda group: dist.all_reduce(tensor, group=group)


def all_gather(nbytes: int, ranks: int) -> Collective:
    """Return the gathering of as many bytes."""
    whole, piece = pieces(nbytes, ranks)
    return lambda group: dist.all_gather_into_tensor(whole, piece, group=group)


def reduce_scatter(nbytes: int, ranks: int) -> Collective:
    """Return the sum of as many bytes, of which each rank gets a part."""
    whole, piece = pieces(nbytes, ranks)
    return lambda group: dist.reduce_scatter_tensor(piece, whole, group=group)


def all_to_all(nbytes: int, ranks: int) -> Collective:
    """Return the exchange of a part of as many bytes with each rank."""
    whole, _ = pieces(nbytes, ranks)
    output = torch.empty_like(whole)
    return lambda group: dist.all_to_all_single(output, whole, group=group)


def broadcast(nbytes: int, _: int) -> Collective:
    """Return the broadcast of a tensor from rank 0."""
    tensor = torch.zeros(nbytes // 4)
    return lambda group: dist.broadcast(tensor, 0, group=group)


def pieces(nbytes: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of at least `nbytes`, an equal part for each rank, and one of the size of a part."""
    numel = max(nbytes // 4 // ranks, 1)
    return torch.zeros(ranks * numel), torch.zeros(numel)


COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "all_to_all_single": all_to_all,
    "broadcast": broadcast,
}


def name_of(collective: str, size: str, backend_name: str) -> str:
    """Return the name of a variant."""
    return f"{collective}, {size}, {backend_name}"


def work(rank: int, job: CollectivesJob, answers: SimpleQueue) -> None:
    """Run the job as `rank`; rank 0 puts the times, each the slowest rank's, on `answers`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://{HOST}:{job.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    gc.disable()
    times: Times = {}
    for size, nbytes in SIZES.items():
        for name, build in COLLECTIVES.items():
            call = build(nbytes, job.ranks)
            times |= {name_of(name, size, which): turns for which, turns in measure(call, nbytes, groups, job).items()}
    gathered: list[Times] = [{} for _ in range(job.ranks)]
    dist.all_gather_object(gathered, times)
    dist.destroy_process_group()
    if rank == 0:
        answers.put({name: [max(turn) for turn in zip(*(g[name] for g in gathered), strict=True)] for name in times})


def measure(call: Collective, nbytes: int, groups: dict[str, ProcessGroup], job: CollectivesJob) -> Times:
    """Return the seconds of a call in each round, by backend; each round begins with another one."""
    times: Times = {name: [] for name in groups}
    calls = job.calls(nbytes)
    for turn in range(-job.warmup, job.rounds):
        for name in list(groups)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin_s = perf_counter()
            for _ in range(calls):
                call(groups[name])
            seconds = (perf_counter() - begin_s) / calls
            times[name] += [seconds] if turn >= 0 else []
    return times


CLOCK = Clock()
PEERS = {
    name_of(collective, size, which): name_of(collective, size, "gloo")
    for collective in COLLECTIVES
    for size in SIZES
    for which in ("commrt", "gloo")
}


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the job."""
    return CLOCK.now_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """Run the job once for this file; return the seconds of every variant and round."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.create_server((HOST, 0)) as server:
        job = CollectivesJob(server.getsockname()[1])
    spawn(work, (job, answers), nprocs=job.ranks)
    measured = answers.get()
    for collective in COLLECTIVES:
        ours = {name: peer for name, peer in PEERS.items() if name.startswith(f"{collective},")}
        append(request.config.getoption("--records"), made("collectives", collective, measured, ours))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{job.ranks} processes, {job.rounds} rounds\n{table(measured, PEERS)}")
    return measured


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="collectives", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_a_collective_of_torch_distributed(benchmark, times: Times, variant: str):
    benchmark.extra_info.update(record(times, variant, PEERS[variant]))
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=len(times[variant]))
