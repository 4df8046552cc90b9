# SPDX-License-Identifier: Apache-2.0
"""One rank of the step benchmark: it averages the same gradients in several ways, interleaved.

Each way has a module whose backward pass is one multiplication per parameter. The time is from before ``backward()``
until the averages are in ``param.grad``.
"""

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from time import perf_counter
from typing import Literal

import torch
import torch.distributed as dist
from interleaved import Times
from model_gradients import Shapes, resnet50
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import commrt
from commrt import c10d
from commrt.buckets.gradient_bucket import GradientBucket
from commrt.buckets.plan import MIB, build_buckets
from commrt.runtime.world import World
from commrt.transport.gloo import GlooTransport
from commrt.transport.shared import SharedTransport

__all__ = ["HOST", "PEERS", "Job", "in_turns", "work"]

HOST = "127.0.0.1"
FP32, BF16 = torch.float32, torch.bfloat16
QUANTIZERS = {"direct int8": commrt.Int8(), "direct int4": commrt.Int4(feedback=False)}
TOLERANCE = {FP32: 1e-6, BF16: 1e-2, QUANTIZERS["direct int8"]: 1e-2, QUANTIZERS["direct int4"]: 0.2}
"""Largest relative L2 error against the average in fp64."""

ALGORITHMS: dict[str, commrt.Algorithm] = {
    "torus2d": commrt.Torus2D(),
    "ring": commrt.Ring(),
    "halving_doubling": commrt.HalvingDoubling(),
    "direct": commrt.Direct(),
}
WAYS = {name: (algorithm, "shared") for name, algorithm in ALGORITHMS.items()}
WAYS["ring over gloo"] = ALGORITHMS["ring"], "gloo"
"""commrt's variants: algorithm and transport."""
VIEWS: dict[str, commrt.Algorithm] = {"torus2d": commrt.Torus2D(), "direct": commrt.Direct()}
"""Algorithms whose gradients live in what travels."""
BACKEND = "ddp, backend commrt"
"""DDP as it is, in a process group of commrt."""
HOOKED = "ddp + torus2d"
"""DDP with commrt's hook."""
PEERS = (
    {"backward alone": "ddp", "ddp": "ddp", "ddp views": "ddp", "gloo, no overlap": "ddp", BACKEND: "ddp"}
    | {f"{name} fp32": "ddp" for name in (*WAYS, HOOKED)}
    | {f"{name} views": "ddp" for name in VIEWS}
    | {"ddp bf16 hook": "ddp"}
    | {f"{name} bf16": "ddp" for name in (*WAYS, HOOKED)}
    | dict.fromkeys(QUANTIZERS, "ddp")
)
"""Every variant, and the one it is compared with."""


@dataclass(frozen=True)
class Job:
    """The settings of a run, for all ranks."""

    port: int
    ranks: int = 4
    warmup: int = 2
    rounds: int = 12


def in_turns(calls: dict[str, Callable[[], object]], rounds: int, number: int, warmup: int = 1) -> Times:
    """Return the mean seconds of a call on the slowest rank, each in turns of so many in a row; collective."""
    times: Times = {name: [] for name in calls}
    for turn in range(-warmup, rounds):
        for name in [*calls][:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin_s = perf_counter()
            for _ in range(number):
                calls[name]()
            mine = torch.tensor([(perf_counter() - begin_s) / number], dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            times[name] += [mine.item()] * (turn >= 0)
    return times


class Dots(nn.Module):
    """A model with a loss of the sum of ``param . gradient``, so that the backward pass gives `gradients`."""

    def __init__(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(param) for param in params])
        self.gradients = gradients

    def forward(self) -> Tensor:
        pairs = zip(self.params, self.gradients, strict=True)
        return torch.stack([torch.dot(param.flatten(), gradient) for param, gradient in pairs]).sum()


@dataclass(frozen=True)
class Variant:
    """A way to average. Call `finish` after ``backward()``."""

    wire: torch.dtype | commrt.quantization.Quantizer | None
    module: nn.Module
    finish: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Return the seconds of a step on this rank, from a common start."""
        self.module.zero_grad(set_to_none=True)
        loss = self.module()
        dist.barrier()
        begin_s = perf_counter()
        loss.backward()
        self.finish()
        return perf_counter() - begin_s


def work(rank: int, job: Job, answers: SimpleQueue) -> None:
    """Run the job as `rank`; rank 0 puts the times, each the slowest rank's, on `answers`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    address = f"tcp://{HOST}:{job.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.ranks)
    with ExitStack() as open_worlds:
        worlds = {kind: open_worlds.enter_context(world_over(kind, rank, job.ranks)) for kind in ("shared", "gloo")}
        times = measure(variants(rank, worlds), job)
        gathered: list[Times] = [{} for _ in range(job.ranks)]
        dist.all_gather_object(gathered, times)
    dist.destroy_process_group()
    if rank == 0:
        answers.put({name: [max(turn) for turn in zip(*(g[name] for g in gathered), strict=True)] for name in times})


def world_over(kind: str, rank: int, ranks: int) -> World:
    """Return a world on the running group's store, with the given transport."""
    store = dist.PrefixStore(f"bench/{kind}", dist.distributed_c10d._get_default_store())
    wires = dist.PrefixStore("wires", store)
    carries = SharedTransport if kind == "shared" else GlooTransport
    transport = carries(wires, rank, range(ranks))
    return World(transport, store, rank)


def measure(ways: dict[str, Variant], job: Job) -> Times:
    """Check, warm up, then time the variants interleaved; each round starts with another variant."""
    expected = average(job.ranks)
    for name, variant in ways.items():
        check(name, variant, expected)
    names = list(ways)
    times: Times = {name: [] for name in names}
    gc.disable()
    for turn in range(-job.warmup, job.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = ways[name].step()
            times[name] += [seconds] if turn >= 0 else []
    return times


def check(name: str, variant: Variant, expected: Tensor) -> None:
    """Raise if the average is wrong: then no time counts."""
    variant.step()
    if variant.wire is None:
        return
    found = torch.cat([param.grad.flatten() for param in variant.module.parameters()])
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[variant.wire], f"{name} is off by {error:.1e}"


def variants(rank: int, worlds: dict[str, World]) -> dict[str, Variant]:
    """Return all variants by name. They share the memory of parameters and gradients, but not the modules."""
    shapes = resnet50()
    params = [torch.zeros(shape) for shape in shapes.values()]
    gradients = gradients_of(rank, shapes)

    def dots() -> Dots:
        return Dots(params, gradients)

    ways = {
        "backward alone": Variant(None, dots()),
        "ddp": Variant(FP32, DistributedDataParallel(dots())),
        "ddp views": Variant(FP32, DistributedDataParallel(dots(), gradient_as_bucket_view=True)),
        "gloo, no overlap": bucketed(dots()),
        BACKEND: Variant(FP32, DistributedDataParallel(dots(), process_group=dist.new_group(backend=c10d.NAME))),
    }
    ways |= {
        f"{name} fp32": attached(dots(), worlds[kind], algorithm, FP32) for name, (algorithm, kind) in WAYS.items()
    }
    ways |= {
        f"{name} views": attached(dots(), worlds["shared"], algorithm, FP32, "views")
        for name, algorithm in VIEWS.items()
    }
    ways[f"{HOOKED} fp32"] = hooked(dots(), worlds["shared"], FP32)
    compressing = DistributedDataParallel(dots())
    compressing.register_comm_hook(None, compress)
    ways["ddp bf16 hook"] = Variant(BF16, compressing)
    ways |= {
        f"{name} bf16": attached(dots(), worlds[kind], algorithm, BF16) for name, (algorithm, kind) in WAYS.items()
    }
    ways[f"{HOOKED} bf16"] = hooked(dots(), worlds["shared"], BF16)
    return ways | {
        name: attached(dots(), worlds["shared"], commrt.Direct(), quantizer) for name, quantizer in QUANTIZERS.items()
    }


def compress(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's bf16 hook. DDP refuses that hook itself on CPUs, though Gloo supports bfloat16.

    DDP compares the annotation of `bucket` with the type itself, so this file has no string annotations.
    """
    return bf16_compress_hook(group, bucket)


def attached(
    module: nn.Module,
    world: World,
    algorithm: commrt.Algorithm,
    wire: torch.dtype | commrt.quantization.Quantizer,
    gradients: Literal["own", "views"] = "own",
) -> Variant:
    """Return the variant of commrt."""
    commrt.attach(module, algorithm=algorithm, world=world, wire=wire, gradients=gradients)
    return Variant(wire, module)


def hooked(module: nn.Module, world: World, wire: torch.dtype) -> Variant:
    """Return the variant of DDP with commrt's hook."""
    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(commrt.DDPState(ALGORITHMS["torus2d"], wire, world), commrt.ddp_hook)
    return Variant(wire, wrapped)


def bucketed(module: nn.Module) -> Variant:
    """Return a variant like DDP without overlap: fill buckets, start all reductions, copy back."""
    buckets = build_buckets(list(module.named_parameters())[::-1], None, 25 * MIB)
    pairs = [pairs_of(bucket) for bucket in buckets]
    return Variant(FP32, module, lambda: reduce_buckets(buckets, pairs))


def pairs_of(bucket: GradientBucket) -> list[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter and its gradient's place in the bucket."""
    layout = bucket.layout
    return [(param, layout.tensor(bucket.wire, i).view(param.shape)) for i, (_, param) in enumerate(bucket.params)]


def reduce_buckets(buckets: list[GradientBucket], pairs: list[list[tuple[nn.Parameter, Tensor]]]) -> None:
    """Average the gradients of `buckets` with Gloo's own all-reduce."""
    works = []
    for bucket, members in zip(buckets, pairs, strict=True):
        for param, view in members:
            torch.mul(param.grad, 1 / dist.get_world_size(), out=view)
        works.append(dist.all_reduce(bucket.wire, async_op=True))
    for running, members in zip(works, pairs, strict=True):
        running.wait()
        for param, view in members:
            param.grad.copy_(view)


def gradients_of(rank: int, shapes: Shapes) -> list[Tensor]:
    """Return the gradients [numel] of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(torch.Size(shape).numel(), generator=generator) for shape in shapes.values()]


def average(ranks: int) -> Tensor:
    """Return the right average, in fp64."""
    shapes = resnet50()
    return sum(torch.cat(gradients_of(rank, shapes)).double() for rank in range(ranks)) / ranks
