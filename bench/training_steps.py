# SPDX-License-Identifier: Apache-2.0
"""The work of each process of `test_training_steps`: the same training steps in several ways, interleaved.

A way that fails is dropped on all ranks, with its error, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import CPU, START_S, Tell, place, waited
from gpu_timer import HAS_GPU
from interleaved import Times
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from training_models import WORKLOADS, Workload

import commrt
from commrt.algorithm import Algorithm
from commrt.errors import CommrtError
from commrt.runtime.world import World
from commrt.training.replica import Replica
from commrt.transport.nccl_binding import load
from commrt.transport.shared import SharedTransport

__all__ = [
    "DDP", "FEW", "FSDP", "NCCL", "PLAIN", "TORUS", "WAYS", "Built", "Raced", "Way", "Worlds",
    "about", "built", "detach", "grouped", "race",
]  # fmt: skip

PLAIN, DDP, FSDP = "plain loop, no exchange", "DDP", "FSDP2"
PEERS, NCCL = "peers", "nccl"
"""Values of COMMRT_TRANSPORT."""
PERIOD = 8
"""Steps of local SGD between two averages."""
STEPS, WARM_STEPS = (PERIOD, 6) if HAS_GPU else (2, 3)
"""Steps per turn, and before the first."""
TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Way:
    """A way to train: commrt's, if it has an algorithm."""

    algorithm: Algorithm | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    medium: str = PEERS


def _ways(name: str, algorithm: Algorithm, medium: str = PEERS) -> dict[str, Way]:
    over = ", over NCCL" if medium == NCCL else ""
    return {
        f"{name}, by calls{over}": Way(algorithm, {"graphs": False}, medium),
        f"{name}, by graphs{over}": Way(algorithm, {"graphs": True}, medium),
    }


BF16 = {"wire": torch.bfloat16, "graphs": True}
DIRECT, TORUS = commrt.Direct(), commrt.Torus2D()
FEW = {PLAIN: Way(), DDP: Way(), **_ways("direct", DIRECT), **_ways("torus2d", TORUS)}
WAYS = {
    PLAIN: Way(),
    DDP: Way(),
    "DDP, bf16 hook": Way(),
    FSDP: Way(),
    **_ways("direct", DIRECT),
    "direct, views, by calls": Way(DIRECT, {"gradients": "views", "graphs": False}),
    "direct, views, by graphs": Way(DIRECT, {"gradients": "views", "graphs": True}),
    "direct, bf16 wire, by graphs": Way(DIRECT, BF16),
    **_ways("torus2d", TORUS),
    "torus2d, views, by graphs": Way(TORUS, {"gradients": "views", "graphs": True}),
    "torus2d, bf16 wire, by graphs": Way(TORUS, BF16),
    "torus2d, watched, by calls": Way(TORUS, {"watch": True, "graphs": False}),
    "gossip": Way(commrt.Gossip()),
    f"local SGD, {PERIOD} steps, delay 2": Way(commrt.LocalSGD(PERIOD, delay=2)),
    **_ways("direct", DIRECT, NCCL),
    **_ways("torus2d", TORUS, NCCL),
}


@dataclass(slots=True)
class Built:
    """One way on this rank, ready to train."""

    workload: Workload
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    replica: Replica | None = None
    world: World | None = None
    host_s: list[float] = field(default_factory=list)
    """The host's time for each bucket."""

    def step(self) -> None:
        """Take one step."""
        self.workload.step(self.forward, self.optimizer)
        if self.replica is not None and self.replica.last is not None:
            self.host_s += [span.end_s - span.begin_s for span in self.replica.last.spans]

    def settle(self) -> None:
        """Wait until nothing is in flight, and free the gradients, which no way needs between two steps."""
        if self.world is not None:
            self.world.comm_thread.submit(int).result()
            self.world.wait()
        waited(self.workload.inputs.device)
        self.optimizer.zero_grad()

    def turn(self) -> float:
        """Return the seconds of a step, as a mean of `STEPS` from a common start."""
        dist.barrier()
        begin_s = waited(self.workload.inputs.device)
        for _ in range(STEPS):
            self.step()
        seconds = (waited(self.workload.inputs.device) - begin_s) / STEPS
        self.settle()
        return seconds


@dataclass(slots=True)
class Raced:
    """What a rank has measured."""

    about: dict[str, Any]
    times: Times = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By way: memory, medium, the host's time per bucket."""
    errors: dict[str, str] = field(default_factory=dict)


class Worlds:
    """A world for each medium, opened when it is asked for first; close them all at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._open = device, dict[str, World]()

    def over(self, medium: str) -> World:
        """Return the world of `medium`. Collective."""
        if medium not in self._open:
            store = dist.PrefixStore(f"steps/{medium}", dist.distributed_c10d._get_default_store())
            rank, ranks = dist.get_rank(), range(dist.get_world_size())
            world = World(SharedTransport(dist.PrefixStore("wires", store), rank, ranks, START_S), store, rank)
            self._open[medium] = world
            if self._device != CPU:
                os.environ["COMMRT_TRANSPORT"] = medium
                world.connect(self._device)
            world.transport.timeout_s = TIMEOUT_S
        return self._open[medium]

    def close(self) -> None:
        """Close them; what failed is known."""
        for world in self._open.values():
            with suppress(CommrtError):
                world.close()


@contextmanager
def grouped() -> Iterator[torch.device]:
    """Choose the device, and join torch's group and its NCCL."""
    device = place()
    dist.init_process_group("gloo" if device == CPU else "nccl", timeout=timedelta(seconds=START_S))
    yield device
    dist.destroy_process_group()


def race(tell: Tell, name: str, ways: Mapping[str, Way], budget_s: float, most: int) -> Raced:
    """Train `ways` in turns for at most `most` rounds or about `budget_s` seconds, and return what was measured.

    It tells what it has after each way and each round, in case the next one hangs.
    """
    begin_s = perf_counter()
    with grouped() as device:
        workload, worlds = WORKLOADS[name](device), Worlds(device)
        raced = Raced(about(device, workload))
        there = {}
        for way, how in ways.items():
            found = attempted(raced, way, lambda way=way, how=how: measured(raced, way, how, workload, worlds))
            there |= {} if found is None else {way: found}
            tell(raced)
        for number in range(most):
            if number and not all_say(perf_counter() - begin_s < budget_s):
                break
            take_turns(raced, there, number)
            tell(raced)
        for way, one in there.items():
            raced.facts[way] |= carried(one)
            detach(one)
        worlds.close()
    return raced


def take_turns(raced: Raced, there: dict[str, Built], number: int) -> None:
    """Measure each way once; each round begins with another one."""
    names = list(there)
    first = number % len(names)
    for way in names[first:] + names[:first]:
        seconds = attempted(raced, way, there[way].turn)
        if seconds is None:
            del there[way]
            raced.times.pop(way, None)
        else:
            raced.times.setdefault(way, []).append(seconds)


def attempted(raced: Raced, way: str, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or None if it failed on any rank, whose error is noted."""
    found, error = None, ""
    try:
        found = work()
    except Exception as failure:  # noted, whatever it is
        error = f"{type(failure).__name__}: {str(failure)[:600]}"
    if all_say(not error):
        return found
    raced.errors[way] = error or "failed on another rank"
    return None


def all_say(yes: bool) -> bool:
    """Return True if all ranks say `yes`."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    votes = torch.tensor(int(yes), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def measured(raced: Raced, way: str, how: Way, workload: Workload, worlds: Worlds) -> Built:
    """Make `way` and warm it up; note the memory that it takes."""
    device = workload.inputs.device
    free, before = free_mib(device), allocated_mib(device)
    one = built(way, how, workload, worlds)
    for _ in range(WARM_STEPS):
        one.step()
    one.settle()
    if device != CPU:
        torch.cuda.reset_peak_memory_stats(device)
    one.turn()
    one.host_s.clear()
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device != CPU else before
    raced.facts[way] = {
        "torch's peak with the model, MiB": round(peak - before, 1),
        "the device's memory, of all ranks, MiB": free - free_mib(device),
    }
    return one


def allocated_mib(device: torch.device) -> float:
    """Return what torch holds for tensors."""
    return torch.cuda.memory_allocated(device) / 2**20 if device != CPU else 0.0


def free_mib(device: torch.device) -> int:
    """Return what is free on the device when no rank works and torch has given back what it does not use."""
    if device == CPU:
        return 0
    waited(device)
    torch.cuda.empty_cache()
    dist.barrier()
    free = torch.cuda.mem_get_info(device)[0] >> 20
    dist.barrier()
    return free


def built(way: str, how: Way, workload: Workload, worlds: Worlds) -> Built:
    """Return `way`, ready to train. Collective."""
    model = workload.model()
    if how.algorithm is not None:
        world, optimizer = worlds.over(how.medium), workload.optimizer(model)
        replica = commrt.attach(model, optimizer, how.algorithm, world=world, **how.options)
        return Built(workload, model, optimizer, replica, world)
    forward = model if way == PLAIN else sharded(model) if way == FSDP else wrapped(model, workload.inputs.device, way)
    return Built(workload, forward, workload.optimizer(forward))


def wrapped(model: nn.Module, device: torch.device, way: str) -> nn.Module:
    """Return `model` in DDP, with its bf16 hook if the name of `way` says so."""
    ids = [device.index] if device != CPU else None
    forward = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if way != DDP:
        forward.register_comm_hook(None, compress)
    return forward


def compress(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16 hook, which DDP refuses on CPUs."""
    return bf16_compress_hook(group, bucket)


# DDP compares annotations with types, so strings will not do.
compress.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def sharded(model: nn.Module) -> nn.Module:
    """Return `model` under FSDP2: each block, or each child, by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # slow to import

    for block in getattr(model, "blocks", model.children()):
        fully_shard(block)
    fully_shard(model)
    return model


def carried(one: Built) -> dict[str, Any]:
    """Return how the buckets of a way were carried."""
    if one.replica is None or one.world is None:
        return {}
    parts = [quantiles(one.host_s, n=10, method="inclusive")[i] for i in (1, 4, 7)] if len(one.host_s) > 1 else []
    return {
        "medium": one.world.transport.kind,
        "buckets": len(one.replica.last.spans) if one.replica.last is not None else 0,
        "host seconds per bucket: 20 %, 50 %, 80 %": parts,
        "why not graphs": sorted(set(one.replica.why_not_graphs().values())),
    }


def detach(one: Built) -> None:
    """Let a model go; what failed is known."""
    if one.replica is not None:
        with suppress(CommrtError):
            one.replica.detach()


def about(device: torch.device, workload: Workload) -> dict[str, Any]:
    """Return what else a figure depends on."""
    nccl = load().get_version() if device != CPU else None
    mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    gpu = torch.cuda.get_device_name(device) if device != CPU else "CPU"
    most = os.environ.get("NCCL_MAX_CTAS")
    model_mib = round(sum(each.nbytes for each in workload.model().state_dict().values()) / 2**20, 1)
    told = {"workload": workload.describes, "model, MiB": model_mib, "gpu": gpu}
    return {**told, "NCCL": nccl, "MPS": mps, "NCCL_MAX_CTAS": most}
