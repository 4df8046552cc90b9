# SPDX-License-Identifier: Apache-2.0
"""Who moves gradients, and how: these kernels beside what torch ships, on the same tensors.

A contender takes the number of a set of tensors. Where one does less than the others, its name says so: they scale,
cast and write flags and a stamp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

import torch
from gradient_sets import SETS
from stopwatch import HAS_GPU, Run
from torch import Tensor

from commrt.buckets import MIB, Unit, plan_buckets
from commrt.kernels import dispatch
from commrt.kernels.layout import Layout, layout_of

__all__ = ["DEVICE", "MORE_TASKS", "OURS", "TASKS", "THOROUGH", "Task", "flat_copies"]

DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
OURS = "commrt"
THOROUGH = "commrt, finite and norm"
F32, BF16 = torch.float32, torch.bfloat16
COUNTED_NUMEL = (25 if HAS_GPU else 1) * MIB // 4
COLD_NBYTES = (200 if HAS_GPU else 1) * MIB
"""Sets are made until they are larger together: three times a large second-level cache."""
SETS_AT_LEAST = 4 if HAS_GPU else 2

Contenders = dict[str, Run]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Task:
    """Something to do, and who can."""

    nbytes: int
    """That must be moved in any case: each input read once, each output written once."""
    sets: int
    contenders: Contenders
    not_in_graphs: frozenset[str] = frozenset()
    """Contenders that copy from the host at each call."""


@dataclass(frozen=True)
class Gradients:
    """One set: gradients of a bucket, its wire, and their places on it."""

    grads: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    dense: Tensor
    """Another wire, without gaps."""
    flat: list[Tensor]
    """The gradients as rows."""


def made(shapes: Shapes, layout: Layout, wire: torch.dtype) -> Gradients:
    """A set of random gradients."""
    grads = [torch.randn(shape, device=DEVICE) for shape in shapes]
    row = torch.randn(layout.numel, device=DEVICE).to(wire)
    views = [layout.tensor(row, i).view(shape) for i, shape in enumerate(shapes)]
    dense = torch.zeros(sum(layout.counts), dtype=wire, device=DEVICE)
    return Gradients(grads, row, views, dense, [grad.view(-1) for grad in grads])


def several(shapes: Shapes, wire: torch.dtype) -> tuple[Layout, list[Gradients]]:
    """As many sets as do not fit into a cache together."""
    layout = layout_of([prod(shape) for shape in shapes])
    nbytes = layout.numel * (4 + wire.itemsize)
    return layout, [made(shapes, layout, wire) for _ in range(max(SETS_AT_LEAST, -(-COLD_NBYTES // nbytes)))]


def pack(shapes: Shapes, wire: torch.dtype) -> Task:
    """Gradients to a wire, times 1/6."""
    layout, sets = several(shapes, wire)
    packings = [dispatch.packing(one.wire, layout, one.grads) for one in sets]
    scale = 1 / 6

    def foreach(one: Gradients) -> None:
        torch._foreach_copy_(one.views, torch._foreach_mul(one.grads, scale))

    def per_tensor(one: Gradients) -> None:
        for grad, view in zip(one.grads, one.views, strict=True):
            torch.mul(grad, scale, out=view)

    def cat(one: Gradients) -> None:
        if wire == F32:
            torch.cat(one.flat, out=one.dense)
        else:
            one.dense.copy_(torch.cat(one.flat).mul_(scale))

    contenders: Contenders = {
        OURS: lambda i: packings[i].pack(sets[i].grads, scale, 1),
        "_foreach_mul, _foreach_copy_": lambda i: foreach(sets[i]),
        "_foreach_copy_ (no scale)": lambda i: torch._foreach_copy_(sets[i].views, sets[i].grads),
        "mul per tensor": lambda i: per_tensor(sets[i]),
        "cat (no scale)" if wire == F32 else "cat, mul_, copy_": lambda i: cat(sets[i]),
    }
    findings = [packing.findings() for packing in packings]
    contenders[THOROUGH] = lambda i: packings[i].pack(sets[i].grads, scale, 1, findings[i])
    return Task(sum(layout.counts) * (4 + wire.itemsize), len(sets), contenders)


def unpack(shapes: Shapes, wire: torch.dtype) -> Task:
    """A wire to gradients."""
    layout, sets = several(shapes, wire)
    packings = [dispatch.packing(one.wire, layout, one.grads) for one in sets]
    for packing, one in zip(packings, sets, strict=True):
        packing.pack(one.grads, 1.0, 1)

    def per_tensor(one: Gradients) -> None:
        for grad, view in zip(one.grads, one.views, strict=True):
            grad.copy_(view)

    def split(one: Gradients) -> None:
        torch.split_with_sizes_copy(one.dense, layout.counts, out=one.flat)

    contenders: Contenders = {
        OURS: lambda i: packings[i].unpack(sets[i].grads, 1),
        "_foreach_copy_": lambda i: torch._foreach_copy_(sets[i].grads, sets[i].views),
        "copy_ per tensor": lambda i: per_tensor(sets[i]),
    }
    if wire == F32:
        contenders["split_with_sizes_copy"] = lambda i: split(sets[i])
    not_in_graphs = frozenset({"split_with_sizes_copy"})
    return Task(sum(layout.counts) * (4 + wire.itemsize), len(sets), contenders, not_in_graphs)


def mix(shapes: Shapes, wire: torch.dtype) -> Task:
    """Weights half way to what a peer sent."""
    layout, sets = several(shapes, wire)
    packings = [dispatch.packing(one.wire, layout, one.grads) for one in sets]

    wide = torch.zeros(layout.numel, device=DEVICE)
    widened = [layout.tensor(wide, i).view(shape) for i, shape in enumerate(shapes)]

    def foreach(one: Gradients) -> None:
        if wire != F32:
            wide.copy_(one.wire)
        torch._foreach_lerp_(one.grads, one.views if wire == F32 else widened, 0.5)

    def per_tensor(one: Gradients) -> None:
        for grad, view in zip(one.grads, one.views, strict=True):
            grad.lerp_(view.float(), 0.5)

    contenders: Contenders = {
        OURS: lambda i: packings[i].mix(sets[i].grads, sets[i].wire, None, 0.5),
        "_foreach_lerp_": lambda i: foreach(sets[i]),
        "lerp_ per tensor": lambda i: per_tensor(sets[i]),
    }
    return Task(sum(layout.counts) * (8 + wire.itemsize), len(sets), contenders)


def reduce(numel: int, ranks: int, dtype: torch.dtype) -> Task:
    """A buffer plus what came from `ranks` ranks."""
    nbytes = numel * dtype.itemsize
    count = max(SETS_AT_LEAST, -(-COLD_NBYTES // (nbytes * (1 + ranks))))
    sets = [torch.randn(1 + ranks, numel, device=DEVICE).to(dtype) for _ in range(count)]
    adders = [dispatch.adding(one[0], list(one[1:])) for one in sets]

    def chained(one: Tensor) -> None:
        for part in one[1:]:
            one[0].add_(part)

    sums = torch.zeros(numel, dtype=dtype, device=DEVICE)
    contenders: Contenders = {
        OURS: lambda i: adders[i](),
        "sum in one pass": lambda i: torch.sum(sets[i], 0, out=sums),
        "upcast, sum, downcast": lambda i: sets[i][0].copy_(sets[i].float().sum(0)),
        "add_" if ranks == 1 else "add_ one by one (rounds each time)": lambda i: chained(sets[i]),
    }
    return Task(nbytes * (2 + ranks), count, contenders)


def in_buckets(name: str) -> Task:
    """All gradients of a set in buckets of 25 MiB, to a bf16 wire; DDP's way with its hook that compresses."""
    tasks = [pack(members, BF16) for members in buckets_of(name)]
    sets = min(task.sets for task in tasks)
    contenders: Contenders = {
        who: lambda i, who=who: [task.contenders[who](i) for task in tasks] for who in tasks[0].contenders
    }
    rows = [torch.zeros(task.nbytes // 6, device=DEVICE) for task in tasks]
    lists = [[torch.randn(shape, device=DEVICE) for shape in members] for members in buckets_of(name)]
    pieces_of = [row.split([grad.numel() for grad in grads]) for row, grads in zip(rows, lists, strict=True)]

    def hooked() -> None:
        for row, grads, places in zip(rows, lists, pieces_of, strict=True):
            for grad, place in zip(grads, places, strict=True):
                torch.mul(grad.view(-1), 1 / 6, out=place)
            row.to(BF16).div_(6)

    contenders["DDP's copies, bf16 hook"] = lambda _: hooked()
    return Task(sum(task.nbytes for task in tasks), sets, contenders)


def moving(shapes: Shapes) -> Task:
    """Packing gradients that lie elsewhere at every call: what watching addresses costs the host."""
    layout, sets = several(shapes, BF16)
    packing = dispatch.packing(sets[0].wire, layout, sets[0].grads)
    contenders: Contenders = {
        OURS: lambda i: packing.pack(sets[i].grads, 1.0, 1),
        "_foreach_copy_ (no scale)": lambda i: torch._foreach_copy_(sets[i].views, sets[i].grads),
    }
    return Task(sum(layout.counts) * 6, len(sets), contenders, frozenset({OURS}))


def flat_copies(nbytes: int) -> Contenders:
    """Ways to copy a row: the fastest is the most that can be had."""
    source, target = (torch.ones(nbytes // 4, device=DEVICE) for _ in range(2))
    layout = layout_of([len(source)])
    packing = dispatch.packing(torch.zeros(layout.numel, device=DEVICE), layout, [target])
    packing.pack([target], 1.0, 1)
    return {
        "copy_": lambda _: target.copy_(source),
        "add 0": lambda _: torch.add(source, 0, out=target),
        OURS: lambda _: packing.unpack([target], 1),
    }


def shapes_of(name: str) -> Shapes:
    """All gradients of a set, in the order in which they become ready."""
    return list(SETS[name]().values())[::-1]


def buckets_of(name: str) -> list[Shapes]:
    """The gradients of each bucket of 25 MiB."""
    shapes = shapes_of(name)
    units = [Unit("", 4 * prod(shape), F32) for shape in shapes]
    return [[shapes[i] for i in members] for members in plan_buckets(units, 25 * MIB, MIB)]


def bucket_of(name: str, number: int) -> Shapes:
    """The gradients of one of them."""
    return buckets_of(name)[number]


def pieces(total: int, count: int) -> Shapes:
    """`count` tensors of about `total` elements together."""
    bounds = [total * i // count for i in range(count + 1)]
    return [(end - begin,) for begin, end in pairwise(bounds)]


MAIN = "ResNet-50" if HAS_GPU else "GoogLeNet"
OTHERS = tuple(name for name in SETS if name not in (MAIN, "Llama-3-8B")) if HAS_GPU else ()
UNPACKED = ("BERT-large", "GPT-2 124M") if HAS_GPU else ()
MIXED = ("VGG-16",) if HAS_GPU else ()
SIZES_MIB = (25, 256) if HAS_GPU else (1,)
COUNTS = (1, 16, 256, 4096) if HAS_GPU else (16,)
WIRES = {"fp32": F32, "bf16": BF16}

Make = Callable[[], Task]


def with_each_wire(name: str, make: Callable[[Shapes, torch.dtype], Task], shapes: Shapes) -> dict[str, Make]:
    """Two tasks, by name."""
    return {name.format(label): partial(make, shapes, dtype) for label, dtype in WIRES.items()}


TASKS: dict[str, Make] = {
    **with_each_wire(f"pack fp32 to {{}}, {MAIN}", pack, shapes_of(MAIN)),
    **with_each_wire("pack fp32 to {}, a bucket of ResNet-50", pack, bucket_of("ResNet-50", 2)),
    f"pack fp32 to bf16, {MAIN} in buckets": partial(in_buckets, MAIN),
    **with_each_wire(f"unpack {{}} to fp32, {MAIN}", unpack, shapes_of(MAIN)),
    **with_each_wire(f"mix fp32 with {{}}, {MAIN}", mix, shapes_of(MAIN)),
    **{f"reduce bf16 of {k}, {m} MiB": partial(reduce, m * MIB // 2, k, BF16) for k in (1, 3) for m in SIZES_MIB},
    "pack fp32 to bf16, all gradients moved": partial(moving, bucket_of("ResNet-50", 3)),
}
"""What goals are set for: measured in every way. By name, made when called."""

MORE_TASKS: dict[str, Make] = {
    **{f"pack fp32 to bf16 in {count}": partial(pack, pieces(COUNTED_NUMEL, count), BF16) for count in COUNTS},
}
"""How that goes on for other models and counts: measured in one way."""

for model in OTHERS:
    MORE_TASKS |= with_each_wire(f"pack fp32 to {{}}, {model}", pack, shapes_of(model))
for model in UNPACKED:
    MORE_TASKS |= with_each_wire(f"unpack {{}} to fp32, {model}", unpack, shapes_of(model))
for model in MIXED:
    MORE_TASKS |= with_each_wire(f"mix fp32 with {{}}, {model}", mix, shapes_of(model))
