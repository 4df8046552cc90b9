# SPDX-License-Identifier: Apache-2.0
"""Who moves gradients, and how: these kernels beside what torch ships, on the same tensors.

A contender takes the number of a set of tensors. Where one does less than the others, its name says so: they scale,
cast and write flags and a stamp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from gradient_sets import SETS
from stopwatch import HAS_GPU, Run
from torch import Tensor

from commrt.buckets import MIB, Unit, plan_buckets
from commrt.kernels import dispatch
from commrt.kernels.layout import Layout, layout_of

__all__ = ["DEVICE", "OURS", "TASKS", "THOROUGH", "Task", "flat_copies"]

DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
OURS = "commrt"
THOROUGH = "commrt, finite and norm"
F32, BF16 = torch.float32, torch.bfloat16
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

    @property
    def flat(self) -> list[Tensor]:
        """The gradients as rows."""
        return [grad.view(-1) for grad in self.grads]


def made(shapes: Shapes, layout: Layout, wire: torch.dtype) -> Gradients:
    """A set of random gradients."""
    grads = [torch.randn(shape, device=DEVICE) for shape in shapes]
    row = torch.zeros(layout.numel, dtype=wire, device=DEVICE)
    views = [layout.tensor(row, i).view(shape) for i, shape in enumerate(shapes)]
    return Gradients(grads, row, views, torch.zeros(sum(layout.counts), dtype=wire, device=DEVICE))


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
    if dispatch.is_on_gpu(sets[0].wire):
        thorough = [Findings(packing, one.wire) for packing, one in zip(packings, sets, strict=True)]
        contenders[THOROUGH] = lambda i: thorough[i]()
    return Task(sum(layout.counts) * (4 + wire.itemsize), len(sets), contenders)


class Findings:
    """Packing that also looks for what is not finite, and adds up squares: gradients as they were packed last."""

    def __init__(self, packing: dispatch.Packing, wire: Tensor) -> None:
        from commrt.kernels.device import launch, sizes, variants  # noqa: PLC0415  # Triton is there only with a GPU

        cut = sizes.sizes_for(launch.arch_of(wire.device))
        variant = variants.pack(F32, wire.dtype, 16, cut, nonfinite=True, sums=True)
        self._tables, self._launch = packing.tables, launch.launch_of(variant, wire.device)
        self._memory = (
            wire,
            torch.full((1,), 1 / 6, device=wire.device),
            torch.zeros(1, dtype=torch.int32, device=wire.device),
            torch.zeros(self._tables.tiles * cut.warps, device=wire.device),
        )

    def __call__(self) -> None:
        """One launch."""
        wire, *rest = (tensor.data_ptr() for tensor in self._memory)
        columns = (column.data_ptr() for column in self._tables.columns)
        self._launch(self._tables.tiles, *columns, wire, 1, *rest)


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

    def foreach(one: Gradients) -> None:
        torch._foreach_lerp_(one.grads, [view.float() for view in one.views], 0.5)

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

    contenders: Contenders = {
        OURS: lambda i: adders[i](),
        "upcast, sum, downcast": lambda i: sets[i][0].copy_(sets[i].float().sum(0)),
        "add_" if ranks == 1 else "add_ one by one (rounds each time)": lambda i: chained(sets[i]),
    }
    return Task(nbytes * (2 + ranks), count, contenders)


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


def bucket_of(name: str, number: int) -> Shapes:
    """The gradients of one bucket of 25 MiB."""
    shapes = shapes_of(name)
    units = [Unit("", 4 * prod(shape), F32) for shape in shapes]
    return [shapes[i] for i in plan_buckets(units, 25 * MIB, MIB)[number]]


def pieces(total: int, count: int) -> Shapes:
    """`count` tensors of about `total` elements together."""
    bounds = [total * i // count for i in range(count + 1)]
    return [(end - begin,) for begin, end in pairwise(bounds)]


WHOLE = ("ResNet-50", "BERT-large", "GPT-2 124M") if HAS_GPU else ("GoogLeNet",)
MIXED = ("ResNet-50", "VGG-16") if HAS_GPU else ("GoogLeNet",)
SIZES_MIB = (25, 256) if HAS_GPU else (1,)
COUNTS = (1, 16, 256, 4096) if HAS_GPU else (16,)
ALL = ("ResNet-50", *[name for name in SETS if name not in ("ResNet-50", "Llama-3-8B")]) if HAS_GPU else ("GoogLeNet",)

TASKS: dict[str, Callable[[], Task]] = {
    **{
        f"pack fp32 to {w}, {s}": lambda s=s, d=d: pack(shapes_of(s), d)
        for s in ALL
        for w, d in (("fp32", F32), ("bf16", BF16))
    },
    "pack fp32 to fp32, a bucket of ResNet-50": lambda: pack(bucket_of("ResNet-50", 2), F32),
    "pack fp32 to bf16, a bucket of ResNet-50": lambda: pack(bucket_of("ResNet-50", 2), BF16),
    **{
        f"unpack {w} to fp32, {s}": lambda s=s, d=d: unpack(shapes_of(s), d)
        for s in WHOLE
        for w, d in (("fp32", F32), ("bf16", BF16))
    },
    **{
        f"mix fp32 with {w}, {s}": lambda s=s, d=d: mix(shapes_of(s), d)
        for s in MIXED
        for w, d in (("fp32", F32), ("bf16", BF16))
    },
    **{
        f"reduce bf16 of {k}, {m} MiB": lambda k=k, m=m: reduce(m * MIB // 2, k, BF16)
        for k in (1, 3)
        for m in SIZES_MIB
    },
    **{
        f"pack fp32 to bf16, 25 MiB in {n}": lambda n=n: pack(pieces((25 if HAS_GPU else 1) * MIB // 4, n), BF16)
        for n in COUNTS
    },
    "pack fp32 to bf16, all gradients moved": lambda: moving(bucket_of("ResNet-50", 3)),
}
"""By name, made when called."""
