# SPDX-License-Identifier: Apache-2.0
"""Exchanges of the same size by several algorithms, each with its own memory, and the results that they must have.

The right result for buffers of 1, 2, 3, ... times a pattern is replayed from the schedule, and checked before an
exchange is timed. With a 16-bit wire, commrt packs and unpacks as a bucket does, and Gloo casts. Codes travel by
`World.all_reduce`, from the values to the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

import commrt
from commrt.kernels import dispatch
from commrt.kernels.layout import layout_of
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.schedule import ADD, COPY, Algorithm, Schedule
from commrt.transport.protocol import Tag

__all__ = ["GLOO", "Exchange", "exchanges", "replayed"]

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTIZERS = (commrt.quantization.Int8(), commrt.quantization.Int4(), commrt.quantization.Int2())
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, QUANTIZERS[0]: 1e-2, QUANTIZERS[1]: 0.1, QUANTIZERS[2]: 0.5}
GLOO = "Gloo all_reduce"
GOSSIPED = 3
"""Steps of gossip that are measured: partners at all distances."""


def algorithms(hosts: int, per_host: int) -> dict[str, Algorithm]:
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
        for name, algorithm in algorithms(world.size // per_host, per_host).items():
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
