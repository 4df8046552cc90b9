# SPDX-License-Identifier: Apache-2.0
"""The work of each process of `test_systems`: ways of training, the torch.distributed backend, the host's time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_ranks import CPU, START_S, Tell, distance, opened, place, untrained, waited
from interleaved import Times
from torch import Tensor
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms.ring import Ring
from commrt.errors import CommrtError
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.protocol import Tag

__all__ = ["PERIOD", "WAYS", "Trained", "backend", "host", "train"]

PERIOD = 4
"""Steps of local SGD between two averages."""
WAYS: dict[str, dict[str, Any]] = {
    "views": {"algorithm": commrt.Torus2D(), "gradients": "views"},
    "views that stay": {"algorithm": commrt.Torus2D(), "gradients": "views"},
    "views of a direct exchange": {"algorithm": commrt.Direct(), "gradients": "views"},
    "bf16 wire": {"algorithm": commrt.Torus2D(), "wire": torch.bfloat16},
    "8-bit wire": {"algorithm": commrt.Direct(), "wire": commrt.Int8()},
    "4-bit wire": {"algorithm": commrt.Direct(), "wire": commrt.Int4()},
    "fp8 wire": {"algorithm": commrt.Direct(), "wire": commrt.Float8()},
    "fp64": {"algorithm": commrt.Torus2D()},
    "fp64, views": {"algorithm": commrt.Torus2D(), "gradients": "views"},
    "fp64, gossip": {"algorithm": commrt.Gossip()},
    "gossip": {"algorithm": commrt.Gossip()},
    "local SGD": {"algorithm": commrt.LocalSGD(PERIOD, delay=1)},
    "backup workers": {"algorithm": commrt.BackupWorkers(1)},
}
STAYS = "views that stay"
"""This way's gradients are set to zero in place, so that autograd adds to them on the wire."""
BOUND, SENT, TORCH_SENT = "commrt, bound as in a step", "commrt, World.run", "torch.distributed.batch_isend_irecv"


class Trained(NamedTuple):
    """The end of one run."""

    distance: float
    """Largest relative distance of a parameter from training on the CPU."""
    equal: bool
    """All replicas have the same bits."""
    loss: float
    """Mean of the last five steps."""
    first_loss: float


def train(_: Tell, ways: list[str], steps: int) -> dict[str, Trained | str]:
    """Train each way on the device and on the CPU, in a world of its own; an error becomes its text."""
    device = place()
    ended: dict[str, Trained | str] = {}
    for way in ways:
        try:
            with opened(device) as world:
                there, losses, equal = trained(world, way, steps, device)
                here, _, _ = trained(world, way, steps, CPU)
            ended[way] = Trained(distance(there, here), equal, sum(losses[-5:]) / 5, losses[0])
        except CommrtError as error:
            ended[way] = f"{type(error).__name__}: {error}"
    return ended


def trained(world: World, way: str, steps: int, device: torch.device) -> tuple[list[Tensor], list[float], bool]:
    """Train one way; return the parameters, the losses, and whether all replicas have the same bits."""
    model = untrained(device).to(torch.float64 if "fp64" in way else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replica = commrt.attach(model, optimizer, world=world, bucket_cap_mb=0.1, **WAYS[way])
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=way != STAYS)
        losses.append(one_step(model, optimizer, world.rank, step, device))
    equal = replica.replicas_equal()
    replica.detach()
    return [param.detach().cpu() for param in model.parameters()], [loss.item() for loss in losses], equal


def one_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, device: torch.device
) -> Tensor:
    """Take one step on the data of `rank`; return the loss."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    y = x[:, :10].argmax(dim=1)
    loss = cross_entropy(model(x.to(next(model.parameters()))), y.to(device))
    loss.backward()
    optimizer.step()
    return loss.detach()


def backend(_: Tell, numels: list[int]) -> list[str]:
    """Call the collectives of the backend for torch.distributed on the device; return what went wrong."""
    import commrt.c10d  # noqa: F401, PLC0415  # registers it

    device = place()
    dist.init_process_group("commrt", timeout=timedelta(seconds=START_S))
    wrong = [f"{name}, {numel}" for numel in numels for name, right in calls(device, numel).items() if not right()]
    waited(device)
    dist.destroy_process_group()
    return wrong


def calls(device: torch.device, numel: int) -> dict[str, Callable[[], bool]]:
    """Return, by name, functions that call a collective and say whether the result is right."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [torch.arange(numel, dtype=torch.float32, device=device) + each for each in range(ranks)]
    own, total = every[rank], torch.stack(every).sum(0)

    def all_reduce(*, async_op: bool) -> bool:
        row = own.clone()
        work = dist.all_reduce(row, async_op=async_op)
        if work is not None:
            work.wait()
        return torch.equal(row, total)

    def broadcast() -> bool:
        row = own.clone()
        dist.broadcast(row, 1)
        return torch.equal(row, every[1])

    def all_gather() -> bool:
        rows = torch.empty(ranks * numel, device=device)
        dist.all_gather_into_tensor(rows, own)
        return torch.equal(rows, torch.cat(every))

    def reduce_scatter() -> bool:
        row = torch.empty(numel, device=device)
        dist.reduce_scatter_tensor(row, own.repeat(ranks))
        return torch.equal(row, total)

    def all_to_all() -> bool:
        rows = torch.empty(ranks * numel, device=device)
        dist.all_to_all_single(rows, own.repeat(ranks))
        return torch.equal(rows, torch.cat(every))

    def send_and_receive() -> bool:
        row = torch.empty(numel, device=device)
        mine = dist.P2POp(dist.isend, own, (rank + 1) % ranks), dist.P2POp(dist.irecv, row, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv(list(mine)):
            work.wait()
        return torch.equal(row, every[(rank - 1) % ranks])

    return {
        "all_reduce": partial(all_reduce, async_op=False),
        "all_reduce, async": partial(all_reduce, async_op=True),
        "broadcast": broadcast,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "send and receive": send_and_receive,
    }


def host(_: Tell, numel: int, rounds: int) -> Times:
    """Return the seconds that the host needs to queue the exchanges of a ring all-reduce of two ranks, interleaved.

    torch's way sends and receives by ``batch_isend_irecv``, with ``add_`` and ``copy_`` between. The device is idle
    before each, so that no queue is full.
    """
    device = place()
    dist.init_process_group("gloo" if device == CPU else "nccl", timeout=timedelta(seconds=START_S))
    with opened(device) as world:
        schedule = Ring().schedule(0, world.size)
        buffer, own = (torch.zeros(numel, device=device) for _ in range(2))
        ways = {
            BOUND: bound(world, schedule, torch.zeros_like(buffer)),
            SENT: partial(world.run, schedule, buffer),
            TORCH_SENT: by_torch(own),
        }
        times: Times = {name: [] for name in ways}
        for turn in range(-5, rounds):
            for name, way in ways.items():
                dist.barrier()
                waited(device)
                begin_s = perf_counter()
                way()
                times[name] += [perf_counter() - begin_s] * (turn >= 0)
        waited(device)
    dist.destroy_process_group()
    return times


def bound(world: World, schedule: Schedule, buffer: Tensor) -> Callable[[], object]:
    """Return what a step does for each bucket: a bound program, run on the communication thread."""
    own = program(schedule, world.rank)
    ready = world.comm_thread.submit(lambda: bind(own, buffer, world.transport)).result()
    return lambda: world.comm_thread.submit(lambda: ready.run(Tag(0, "host"))).result()


def by_torch(row: Tensor) -> Callable[[], None]:
    """Return the same all-reduce of two ranks by torch's own sends and receives."""
    rank = dist.get_rank()
    halves, arrived = row.chunk(2), torch.empty_like(row.chunk(2)[0])
    mine, its = halves[rank], halves[1 - rank]

    def exchange(out: Tensor, into: Tensor) -> None:
        works = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    def run() -> None:
        exchange(its, arrived)
        mine.add_(arrived)
        exchange(mine, its)

    return run
