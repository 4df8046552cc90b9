# SPDX-License-Identifier: Apache-2.0
"""The work of each process of `test_ranks`: one rank, on its own GPU, on a shared one, or on the CPU.

If there are more ranks than GPUs, NCCL is told that they may share one. Versions older than 2.30.3 are told that the
ranks are on different hosts, so that they exchange through sockets.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import quantiles
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_timer import allocations, waiting_is_an_error
from interleaved import Times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithm import Algorithm
from commrt.algorithms.catalogue import ALGORITHMS, by_name
from commrt.errors import CommrtError
from commrt.program import program
from commrt.runtime.world import World
from commrt.schedule import MIX, Schedule, Step
from commrt.transport.nccl_binding import load

__all__ = [
    "beside_torch",
    "fail_and_begin_again",
    "mix",
    "race",
    "reduce",
    "sound",
    "struck",
    "swap",
    "thrift",
    "train",
    "train_by_graphs",
]

Tell = Callable[[Any], None]
TORCH = "torch.distributed.all_reduce"
CPU = torch.device("cpu")
LACKING = 4
"""The step in which rank 0 has no gradients of the first layer."""
WARM_STEPS = 5
"""Steps until buckets are cut, kernels loaded, peers connected and graphs made."""
START_S, STEP_S = 120.0, 60.0
SHARES_GPUS = 23003
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""NCCL's variables if several ranks share a GPU: use this machine only, and leave memory for the next rank."""


class Carried(NamedTuple):
    """How a run exchanged its buckets."""

    host_s: list[float]
    """The host's time for one bucket: 20th, 50th and 80th percentile."""
    why_not: list[str]
    """Why the last step used no graphs."""


class ByGraphs(NamedTuple):
    """Results of training with and without graphs."""

    same: bool
    """True if the parameters are equal bit by bit."""
    sliced_distance: float
    """Distance of training in slices to training on the CPU."""
    calls_s: list[float]
    graphs_s: list[float]
    """The host's time for one bucket with graphs: percentiles."""
    launches: int
    """Launches of a bucket: pack, groups, additions, unpack."""
    why_not: list[str]


def place() -> torch.device:
    """Choose and return this rank's device. Call it first."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        return CPU
    rank, ranks, gpus = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    os.environ["NCCL_RAS_ENABLE"] = "0"
    if ranks > gpus:
        os.environ.update({**ALONE, **{name: os.environ[name] for name in ("NCCL_MAX_CTAS",) if name in os.environ}})
        shares = load().get_version() >= SHARES_GPUS
        os.environ.update({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if shares else {"NCCL_HOSTID": f"rank{rank}"})
    torch.cuda.set_device(rank % gpus)
    return torch.device("cuda", rank % gpus)


def opened(device: torch.device, timeout_s: float = STEP_S) -> World:
    """Open a world that reaches `device`."""
    world = commrt.init(timeout_s, start_timeout_s=START_S)
    if device != CPU:
        world.connect(device)
    return world


def waited(device: torch.device) -> float:
    """Wait for `device`, and return the time."""
    if device != CPU:
        torch.cuda.synchronize(device)
    return perf_counter()


def swap(_: Tell, numel: int, rounds: int = 10) -> list[float]:
    """Exchange `numel` floats between two ranks; return the seconds of each time, without connecting."""
    device = place()
    schedule = Schedule("swap", 2, 2, lambda: iter([Step.of([0, 1], [1, 0], [0, 1], [1, 2], commrt.COPY)]))
    with opened(device) as world:
        seconds = []
        for number in range(rounds + 1):
            buffer = torch.full((2 * numel,), float(10 * number + world.rank), device=device)
            begin_s = waited(device)
            world.run(schedule, buffer)
            seconds.append(waited(device) - begin_s)
            assert buffer.view(2, -1)[:, 0].tolist() == [10.0 * number, 10.0 * number + 1]
    return seconds[1:]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values of `rank`, on the CPU."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def on_both(world: World, schedule: Schedule, buffer: Tensor, device: torch.device) -> bool:
    """Return True if `schedule` gives the same bits on `device` as on the CPU."""
    here, there = buffer.clone(), buffer.to(device)
    world.run(schedule, here)
    world.run(schedule, there)
    return torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


def reduce(_: Tell, cases: list[tuple[str, int, torch.dtype]]) -> list[bool]:
    """Return, for each (algorithm, numel, dtype), whether its all-reduce gives the bits of the CPU."""
    device = place()
    with opened(device) as world:
        return [
            on_both(world, by_name(name).schedule(0, world.size), values(world.rank, numel, dtype), device)
            for name, numel, dtype in cases
        ]


def mix(_: Tell, numel: int, rounds: int) -> bool:
    """Mix changing pairs half way, as in gossip; return True if the bits are those of the CPU."""
    device = place()
    with opened(device) as world:
        ranks = world.size
        steps = [Step.of(range(ranks), [rank ^ (1 << k) for rank in range(ranks)], 0, 1, MIX) for k in range(rounds)]
        schedule = Schedule("pairs", ranks, 1, lambda: iter(steps))
        return on_both(world, schedule, values(world.rank, numel, torch.float32), device)


def train(_: Tell, algorithm: str, steps: int) -> tuple[float, bool]:
    """Train on the device and the CPU; return the largest relative distance, and whether replicas are equal."""
    device = place()
    with opened(device) as world:
        there, equal, _ = trained(world.rank, by_name(algorithm), steps, device)
        here, _, _ = trained(world.rank, by_name(algorithm), steps, CPU)
    return distance(there, here), equal


def train_by_graphs(_: Tell, steps: int) -> ByGraphs:
    """Train with and without graphs, and in slices; return the comparison."""
    device = place()
    ring, sliced = commrt.Ring(), commrt.algorithms.Sliced(commrt.Ring(), 2)
    with opened(device) as world:
        by_calls, _, calls = trained(world.rank, ring, steps, device)
        by_graphs, _, graphs = trained(world.rank, ring, steps, device, graphs=True)
        in_slices, _, _ = trained(world.rank, sliced, steps, device)
        on_cpu, _, _ = trained(world.rank, sliced, steps, CPU)
    hops = [hop for hop in program(ring.schedule(0, world.size), world.rank).hops if not hop.idle]
    launches = 2 + sum(1 + bool(hop.combined) for hop in hops)
    same = all(map(torch.equal, by_calls, by_graphs))
    return ByGraphs(same, distance(in_slices, on_cpu), calls.host_s, graphs.host_s, launches, graphs.why_not)


def distance(there: list[Tensor], here: list[Tensor]) -> float:
    """Return the largest relative distance of a parameter."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(there, here, strict=True))


def trained(
    rank: int, algorithm: Algorithm, steps: int, device: torch.device, *, graphs: bool = False
) -> tuple[list[Tensor], bool, Carried]:
    """Train; return the parameters, whether all replicas have the same bits, and how buckets were exchanged."""
    model = untrained(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = commrt.attach(model, optimizer, algorithm, bucket_cap_mb=0.1, graphs=graphs)
    host_s = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(16, 64, generator=generator), torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        wanted = list(model.parameters())[2 * (step == LACKING and rank == 0) :]
        cross_entropy(model(x.to(device)), y.to(device)).backward(inputs=wanted)
        optimizer.step()
        host_s += [span.end_s - span.begin_s for span in replica.last.spans]
    equal = replica.replicas_equal()
    late = host_s[len(host_s) // 2 :]  # the first steps load kernels, and use no graphs
    carried = Carried([quantiles(late, n=10)[i] for i in (1, 4, 7)], sorted(set(replica.why_not_graphs().values())))
    replica.detach()
    return [param.detach().cpu() for param in model.parameters()], equal, carried


def untrained(device: torch.device) -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    return nn.Sequential(*layers).to(device)


def thrift(_: Tell, graphs: bool) -> tuple[int, int, list[str]]:
    """Return how many tensors a backward pass makes, plain and attached, and why no graph was used.

    Raises torch's `RuntimeError` if the host waits for the GPU on the way.
    """
    device = place()
    model, x, y = untrained(device), torch.randn(16, 64, device=device), torch.randint(0, 10, (16,), device=device)
    with opened(device) as world:
        replica = commrt.attach(model, None, commrt.Ring(), world=world, bucket_cap_mb=0.1, graphs=graphs)
        for _ in range(WARM_STEPS):
            made(model, x, y)
        world.wait()
        with waiting_is_an_error():
            attached = made(model, x, y)
        why_not = sorted(set(replica.why_not_graphs().values()))
        replica.detach()
        made(model, x, y)
        return made(model, x, y), attached, why_not


def sound(_: Tell) -> list[str]:
    """Train some steps, the last ones by graphs; return why no graph was used."""
    device = place()
    with opened(device) as world:
        _, _, carried = trained(world.rank, commrt.Ring(), 1 + LACKING, device, graphs=True)
    return carried.why_not


def made(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return how many tensors a backward pass allocates on the device."""
    model.zero_grad()
    loss = cross_entropy(model(x), y)
    before = allocations()
    loss.backward()
    return allocations() - before


def struck(tell: Tell, timeout_s: float) -> tuple[float, str]:
    """Let the last rank be killed in training; return the seconds until the others notice, and their error."""
    device = place()
    with opened(device) as world:
        schedule, buffer = by_name("ring").schedule(0, world.size), torch.ones(1 << 16, device=device)
        for _ in range(3):
            world.run(schedule, buffer)
        waited(device)
        world.transport.timeout_s = timeout_s
        begin_s = perf_counter()
        if world.rank == world.size - 1:
            tell("kill me")
            while True:
                signal.pause()
        try:
            while True:
                world.run(schedule, buffer)
                waited(device)
        except CommrtError as error:
            return perf_counter() - begin_s, f"{type(error).__name__}: {error}"


def beside_torch(_: Tell, rounds: int) -> tuple[float, float]:
    """Exchange by ``torch.distributed`` and by a world, in one order on all ranks; return both sums."""
    device = place()
    dist.init_process_group("gloo" if device == CPU else "nccl", timeout=timedelta(seconds=START_S))
    theirs, ours = (torch.full((1000,), 1.0 + dist.get_rank(), device=device) for _ in range(2))
    with opened(device) as world:
        schedule = by_name("ring").schedule(0, world.size)
        for _ in range(rounds):
            dist.all_reduce(theirs)
            world.run(schedule, ours)
            theirs.div_(world.size)
            ours.div_(world.size)
        waited(device)
    dist.destroy_process_group()
    return theirs[0].item(), ours[0].item()


def race(_: Tell, numel: int, rounds: int) -> Times:
    """Return the seconds of interleaved all-reduces of ``torch.distributed`` and commrt; raise if a sum is wrong."""
    device = place()
    dist.init_process_group("gloo" if device == CPU else "nccl", timeout=timedelta(seconds=START_S))
    with opened(device) as world:
        buffers = {name: world.transport.allocate(numel, torch.float32, device) for name in (TORCH, *ALGORITHMS)}
        ways: dict[str, Callable[[], object]] = {TORCH: lambda: dist.all_reduce(buffers[TORCH])}
        for name, make in ALGORITHMS.items():
            ways[name] = partial(world.run, make().schedule(0, world.size), buffers[name])
        times: Times = {name: [] for name in ways}
        for turn in range(-1, rounds):
            for name, run in ways.items():
                seconds = timed(run, buffers[name], world)
                times[name] += [seconds] * (turn >= 0)
    dist.destroy_process_group()
    return times


def timed(run: Callable[[], object], buffer: Tensor, world: World) -> float:
    """Return the seconds of one all-reduce from a common start to its end; raise if the sum is wrong."""
    buffer.fill_(1.0 + world.rank)
    dist.barrier()
    waited(buffer.device)
    begin_s = perf_counter()
    run()
    waited(buffer.device)
    seconds = perf_counter() - begin_s
    if not bool((buffer == world.size * (world.size + 1) / 2).all()):
        raise RuntimeError("an all-reduce ended with another sum: nothing was measured")
    return seconds


def fail_and_begin_again(_: Tell) -> list[float]:
    """Give a world up, and open another one in the same processes."""
    device = place()
    sums = []
    for attempt in range(2):
        with opened(device) as world:
            buffer = torch.full((1000,), 1.0 + world.rank, device=device)
            world.run(by_name("ring").schedule(0, world.size), buffer)
            sums.append(buffer[-1].item())
            if attempt == 0:
                world.agree("all have seen the sum")
                world.abort(RuntimeError("given up on purpose"))
    return sums
