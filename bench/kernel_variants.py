# SPDX-License-Identifier: Apache-2.0
"""Tasks for the kernels, each with the ways that torch has for it, on the same tensors.

A contender takes the number of a set of tensors. The kernels scale, cast and write flags and a header. If a contender
does less, its name says so. Its result is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

import torch
from gpu_timer import HAS_GPU, Run
from model_gradients import SETS
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from commrt.buckets.plan import MIB, plan_buckets
from commrt.kernels import dispatch
from commrt.kernels.layout import Layout, layout_of

__all__ = ["DEVICE", "MORE_TASKS", "OURS", "TASKS", "Check", "Task", "flat_copies", "gate"]

DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
OURS = "commrt"
UNSCALED, HOOKED, SUMMED = "_foreach_copy_ (no scale)", "DDP's copies, bf16 hook", "sum in one pass"
SPLIT, UNFLATTENED = "split_with_sizes_copy", "_unflatten_dense_tensors, _foreach_copy_"
F32, BF16 = torch.float32, torch.bfloat16
COUNTED_NUMEL = 25 * MIB // 4
COLD_NBYTES = (200 if HAS_GPU else 64) * MIB
"""All sets together are larger than this: on a GPU, three times a large second-level cache."""
COPIES = 2, 1000
"""Least and most copies of a set. More would take long to make, so sets below 64 KB stay in a cache."""
MOST_NBYTES = (32 << 10 if HAS_GPU else 128) * MIB
"""Bytes of a set's gradients that are used, beginning with the first to become ready."""
TOLERANCE = {F32: 1e-6, BF16: 1e-2}
"""Largest relative L2 error. Contenders that add one by one round each time."""
SCALE = 1 / 6

Contenders = dict[str, Run]
Row = Callable[[], Tensor]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Check:
    """The result that a contender must have on set 0."""

    wanted: Row
    """Computes the right result, before the run."""
    found: Row
    """Returns the result, after the run."""
    spoil: Callable[[], object] = lambda: None
    """Overwrites the result's memory before the run, so that the result of an earlier contender does not count."""


@dataclass(frozen=True)
class Task:
    """A task, and the contenders that can do it."""

    nbytes: int
    """Bytes that every contender must move: each input read once, each output written once."""
    sets: int
    contenders: Contenders
    checks: dict[str, Check]
    """One check for each contender."""
    dtype: torch.dtype
    """The dtype of the results, or of their inputs if that is narrower."""
    not_in_graphs: frozenset[str] = frozenset()
    """Contenders that copy from the host at each call."""


def gate(task: Task) -> None:
    """Run each contender once; raise `RuntimeError` if a result is wrong."""
    for who, run in task.contenders.items():
        check = task.checks[who]
        wanted = check.wanted().float()
        check.spoil()
        run(0)
        error = (norm_of(check.found().float().sub_(wanted)) / norm_of(wanted)).item()
        if not error <= TOLERANCE[task.dtype]:
            raise RuntimeError(f"{who} is off by {error:.1e}: nothing was measured")


def norm_of(row: Tensor) -> Tensor:
    """Return the norm, computed in fp64 without a wider copy."""
    return torch.linalg.vector_norm(row, dtype=torch.float64)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a bucket, its wire, and their places on it."""

    grads: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    dense: Tensor
    """Another wire, without gaps."""
    flat: list[Tensor]
    """The gradients with one dimension."""

    def row(self) -> Tensor:
        """Return a copy of all gradients."""
        return torch.cat(self.flat)

    def spoil_wire(self) -> None:
        """Fill both wires with NaN."""
        self.wire.fill_(torch.nan)
        self.dense.fill_(torch.nan)

    def spoil_grads(self) -> None:
        """Fill all gradients with NaN."""
        for grad in self.grads:
            grad.fill_(torch.nan)

    def placed(self) -> Tensor:
        """Return a copy of the wire's content."""
        return torch.cat([view.reshape(-1) for view in self.views])


def made(shapes: Shapes, layout: Layout, wire: torch.dtype) -> Gradients:
    """Return a set of random gradients."""
    grads = [torch.randn(shape, device=DEVICE) for shape in shapes]
    row = torch.randn(layout.numel, device=DEVICE).to(wire)
    views = [layout.tensor(row, i).view(shape) for i, shape in enumerate(shapes)]
    dense = torch.zeros(sum(layout.counts), dtype=wire, device=DEVICE)
    return Gradients(grads, row, views, dense, [grad.view(-1) for grad in grads])


def several(shapes: Shapes, wire: torch.dtype) -> tuple[Layout, list[Gradients]]:
    """Return so many sets that they do not fit into a cache together."""
    layout = layout_of([prod(shape) for shape in shapes])
    nbytes = layout.numel * (4 + wire.itemsize)
    return layout, [made(shapes, layout, wire) for _ in range(_copies_of(nbytes))]


def _copies_of(nbytes: int) -> int:
    return min(max(COPIES[0], -(-COLD_NBYTES // nbytes)), COPIES[1])


def pack(shapes: Shapes, wire: torch.dtype) -> Task:
    """Make the task to copy gradients to a wire, times 1/6."""
    layout, sets = several(shapes, wire)
    packings = [dispatch.packing(one.wire, layout, one.grads) for one in sets]

    def foreach(one: Gradients) -> None:
        torch._foreach_copy_(one.views, torch._foreach_mul(one.grads, SCALE))

    def per_tensor(one: Gradients) -> None:
        for grad, view in zip(one.grads, one.views, strict=True):
            torch.mul(grad, SCALE, out=view)

    def cat(one: Gradients) -> None:
        if wire == F32:
            torch.cat(one.flat, out=one.dense)
        else:
            one.dense.copy_(torch.cat(one.flat).mul_(SCALE))

    flattened = "_flatten_dense_tensors, mul" if wire == F32 else "_flatten_dense_tensors, mul_, copy_"
    catted = "cat (no scale)" if wire == F32 else "cat, mul_, copy_"
    contenders: Contenders = {
        OURS: lambda i: packings[i].pack(sets[i].grads, SCALE, 1),
        "_foreach_mul, _foreach_copy_": lambda i: foreach(sets[i]),
        UNSCALED: lambda i: torch._foreach_copy_(sets[i].views, sets[i].grads),
        "mul per tensor": lambda i: per_tensor(sets[i]),
        catted: lambda i: cat(sets[i]),
        flattened: lambda i: sets[i].dense.copy_(_flatten_dense_tensors(sets[i].grads).mul_(SCALE)),
    }
    one = sets[0]
    checks = dict.fromkeys(contenders, Check(lambda: one.row() * SCALE, one.placed, one.spoil_wire))
    checks[UNSCALED] = Check(one.row, one.placed, one.spoil_wire)
    checks[catted] = Check(lambda: one.row() * (1.0 if wire == F32 else SCALE), lambda: one.dense, one.spoil_wire)
    checks[flattened] = Check(lambda: one.row() * SCALE, lambda: one.dense, one.spoil_wire)
    return Task(sum(layout.counts) * (4 + wire.itemsize), len(sets), contenders, checks, wire)


def unpack(shapes: Shapes, wire: torch.dtype) -> Task:
    """Make the task to copy a wire to gradients."""
    layout, sets = several(shapes, wire)
    packings = [dispatch.packing(one.wire, layout, one.grads) for one in sets]
    for packing, one in zip(packings, sets, strict=True):
        packing.pack(one.grads, 1.0, 1)

    def per_tensor(one: Gradients) -> None:
        for grad, view in zip(one.grads, one.views, strict=True):
            grad.copy_(view)

    def split(one: Gradients) -> None:
        torch.split_with_sizes_copy(one.dense, layout.counts, out=one.flat)

    def unflatten(one: Gradients) -> None:
        torch._foreach_copy_(one.grads, _unflatten_dense_tensors(one.dense, one.grads))

    contenders: Contenders = {
        OURS: lambda i: packings[i].unpack(sets[i].grads, 1),
        "_foreach_copy_": lambda i: torch._foreach_copy_(sets[i].grads, sets[i].views),
        "copy_ per tensor": lambda i: per_tensor(sets[i]),
        UNFLATTENED: lambda i: unflatten(sets[i]),
    }
    if wire == F32:
        contenders[SPLIT] = lambda i: split(sets[i])
    for one in sets:
        one.dense.copy_(one.placed())
    checks = dict.fromkeys(contenders, Check(sets[0].placed, sets[0].row, sets[0].spoil_grads))
    nbytes = sum(layout.counts) * (4 + wire.itemsize)
    return Task(nbytes, len(sets), contenders, checks, wire, not_in_graphs=frozenset({SPLIT}))


def mix(shapes: Shapes, wire: torch.dtype) -> Task:
    """Make the task to move weights half way to those of a peer; ours also reads what was sent."""
    layout, sets = several(shapes, wire)
    sent = [torch.zeros_like(one.wire) for one in sets]
    packings = [dispatch.packing(row, layout, one.grads) for row, one in zip(sent, sets, strict=True)]
    for packing, one in zip(packings, sets, strict=True):
        packing.pack(one.grads, 1.0, 1)
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
        OURS: lambda i: packings[i].mix(sets[i].grads, sets[i].wire, sent[i], 0.5),
        "_foreach_lerp_": lambda i: foreach(sets[i]),
        "lerp_ per tensor": lambda i: per_tensor(sets[i]),
    }
    one = sets[0]
    checks = dict.fromkeys(contenders, Check(lambda: (one.row() + one.placed().float()) / 2, one.row))
    return Task(sum(layout.counts) * (8 + wire.itemsize), len(sets), contenders, checks, wire)


def reduce(numel: int, ranks: int, dtype: torch.dtype) -> Task:
    """Make the task to add the buffers of `ranks` ranks to one buffer."""
    nbytes = numel * dtype.itemsize
    count = _copies_of(nbytes * (1 + ranks))
    sets = [torch.randn(1 + ranks, numel, device=DEVICE).to(dtype) for _ in range(count)]
    adders = [dispatch.adding(one[0], list(one)) for one in sets]

    def chained(one: Tensor) -> None:
        for part in one[1:]:
            one[0].add_(part)

    sums = torch.zeros(numel, dtype=dtype, device=DEVICE)
    contenders: Contenders = {
        OURS: lambda i: adders[i](),
        SUMMED: lambda i: torch.sum(sets[i], 0, out=sums),
        "upcast, sum, downcast": lambda i: sets[i][0].copy_(sets[i].float().sum(0)),
        "add_" if ranks == 1 else "add_ one by one (rounds each time)": lambda i: chained(sets[i]),
    }

    def wanted() -> Tensor:
        return sets[0].float().sum(0)

    checks = dict.fromkeys(contenders, Check(wanted, lambda: sets[0][0]))
    checks[SUMMED] = Check(wanted, lambda: sums, lambda: sums.fill_(torch.nan))
    return Task(nbytes * (2 + ranks), count, contenders, checks, dtype)


def in_buckets(name: str) -> Task:
    """Make the task to pack a set in buckets of 25 MiB to a bf16 wire, also as DDP's hook compresses."""
    tasks = [pack(members, BF16) for members in buckets_of(name)]
    sets = min(task.sets for task in tasks)
    contenders: Contenders = {
        who: lambda i, who=who: [task.contenders[who](i) for task in tasks] for who in tasks[0].contenders
    }
    rows = [torch.zeros(task.nbytes // 6, device=DEVICE) for task in tasks]
    lists = [[torch.randn(shape, device=DEVICE) for shape in members] for members in buckets_of(name)]
    pieces_of = [row.split([grad.numel() for grad in grads]) for row, grads in zip(rows, lists, strict=True)]
    compressed: dict[int, Tensor] = {}

    def hooked() -> None:
        for number, (row, grads, places) in enumerate(zip(rows, lists, pieces_of, strict=True)):
            for grad, place in zip(grads, places, strict=True):
                place.copy_(grad.view(-1))
            compressed[number] = row.to(BF16).div_(6)

    def together(who: str) -> Check:
        checks = [task.checks[who] for task in tasks]
        return Check(
            lambda: torch.cat([check.wanted() for check in checks]),
            lambda: torch.cat([check.found() for check in checks]),
            lambda: [check.spoil() for check in checks],
        )

    checks = {who: together(who) for who in contenders}
    contenders[HOOKED] = lambda _: hooked()
    checks[HOOKED] = Check(
        lambda: torch.cat([grad.view(-1) for grads in lists for grad in grads]) / 6,
        lambda: torch.cat(list(compressed.values())),
    )
    return Task(sum(task.nbytes for task in tasks), sets, contenders, checks, BF16)


def moving(shapes: Shapes) -> Task:
    """Make the task to pack gradients that move between calls: the host's cost of watching addresses."""
    layout, sets = several(shapes, BF16)
    packing = dispatch.packing(sets[0].wire, layout, sets[0].grads)
    contenders: Contenders = {
        OURS: lambda i: packing.pack(sets[i].grads, 1.0, 1),
        UNSCALED: lambda i: torch._foreach_copy_(sets[0].views, sets[i].grads),
    }
    checks = dict.fromkeys(contenders, Check(sets[0].row, sets[0].placed, sets[0].spoil_wire))
    return Task(sum(layout.counts) * 6, len(sets), contenders, checks, BF16, not_in_graphs=frozenset({OURS}))


def flat_copies(nbytes: int) -> Contenders:
    """Return ways to copy a buffer; the fastest is the upper limit."""
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
    """Return the gradients of a set in the order they become ready, as many as fit."""
    taken, room = [], MOST_NBYTES
    for shape in list(SETS[name]().values())[::-1]:
        if 4 * prod(shape) <= room:
            taken.append(shape)
            room -= 4 * prod(shape)
    return taken


def called(name: str) -> str:
    """Return the name of the set, with the size if only a part is taken."""
    taken = 4 * sum(map(prod, shapes_of(name)))
    return name if taken == 4 * sum(map(prod, SETS[name]().values())) else f"{name} ({taken // MIB} MiB of it)"


def buckets_of(name: str) -> list[Shapes]:
    """Return the gradients of each bucket of 25 MiB."""
    shapes = shapes_of(name)
    sizes = [(4 * prod(shape), F32) for shape in shapes]
    return [[shapes[i] for i in members] for members in plan_buckets(sizes, 25 * MIB)]


def bucket_of(name: str, number: int) -> Shapes:
    """Return the gradients of one bucket."""
    return buckets_of(name)[number]


def pieces(total: int, count: int) -> Shapes:
    """Return `count` shapes of about `total` elements together."""
    bounds = [total * i // count for i in range(count + 1)]
    return [(end - begin,) for begin, end in pairwise(bounds)]


MAIN = "ResNet-50"
OTHERS = ("GoogLeNet", "BERT-large", "GPT-2 124M", "GPT-2 1.5B", "Llama-3-8B layer", "10,000 tensors of 64")
ALSO_PACKED = ("VGG-16", "VGG-19") if HAS_GPU else ()
SIZES_MIB = (25, 256) if HAS_GPU else (25,)
COUNTS = (1, 16, 256, 4096)
WIRES = {"fp32": F32, "bf16": BF16}

Make = Callable[[], Task]


def with_each_wire(name: str, make: Callable[[Shapes, torch.dtype], Task], shapes: Shapes) -> dict[str, Make]:
    """Return the task with each wire, by name."""
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
"""The tasks with goals, by name, measured in every way. Call a value to make the task."""

MORE_TASKS: dict[str, Make] = {
    **{f"pack fp32 to bf16 in {count}": partial(pack, pieces(COUNTED_NUMEL, count), BF16) for count in COUNTS},
}
"""The same tasks for other models and counts, measured in one way."""

for model in (*OTHERS, *ALSO_PACKED):
    MORE_TASKS |= with_each_wire(f"pack fp32 to {{}}, {called(model)}", pack, shapes_of(model))
for model in OTHERS:
    MORE_TASKS |= with_each_wire(f"unpack {{}} to fp32, {called(model)}", unpack, shapes_of(model))
    MORE_TASKS |= with_each_wire(f"mix fp32 with {{}}, {called(model)}", mix, shapes_of(model))
