# SPDX-License-Identifier: Apache-2.0
"""Drawn sequences of torch.distributed's calls over two backends: all ranks draw alike, and compare what came."""

from datetime import timedelta
from functools import cache
from random import Random

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from inductor import what_inductor_lacks
from torch.distributed import ReduceOp

INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NUMERIC = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
SHAPES = [(), (1,), (3,), (0,), (2, 3), (5, 1, 2), (64,), (33, 7), (1000,), (300, 50)]
LAYOUTS = ["plain", "transposed", "spaced", "shifted"]
LOOSE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Between sums, or products, in another order."""
TIMEOUT = timedelta(seconds=90)


@cache
def groups(backend):
    """{its name: its group, None on ranks outside}: all, others in another order, two, and one of each rank."""
    size = dist.get_world_size()
    made = {"all": dist.new_group(backend=backend, timeout=TIMEOUT)}
    for ranks in ([*range(size)][::-1], [0, size - 1], *([rank] for rank in range(size))):
        group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
        made[str(ranks)] = group if dist.get_rank() in ranks else None
    return made


def laid_out(x, layout):
    """The values of `x` in memory of another shape."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "spaced" and x.dim():
        return torch.stack([x, x], dim=-1)[..., 0]
    if layout == "shifted":
        whole = x.new_zeros(x.numel() + 1)
        whole[1:] = x.reshape(-1)
        return whole[1:].view(x.shape)
    return x


class Drawing:
    """What all ranks draw alike, by `seed`; values differ between ranks."""

    def __init__(self, seed, backend, group):
        self.random = Random(seed)
        self.group = group
        self.is_reference = backend == "gloo"
        self.ranks = dist.get_process_group_ranks(group)
        self.own = self.ranks.index(dist.get_rank())

    def choice(self, values):
        return self.random.choice(values)

    def tensor(self, shape, dtype, layout, salt, rank=None):
        """Small numbers, others for each rank and salt."""
        if self.is_reference:
            layout = "plain"  # Gloo takes the memory of a tensor with gaps for that of its values
        generator = torch.Generator().manual_seed(1000 * salt + (self.own if rank is None else rank))
        whole = torch.randint(0, 4, shape, generator=generator)
        if dtype.is_floating_point:
            return laid_out((whole + torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype), layout)
        return laid_out(whole.to(dtype), layout)


def draw_call(draw):
    """One call: its name, and a function that makes it and returns (work or None, what to compare)."""
    name = draw.choice([*CALLS])
    dtype = draw.choice(INTEGERS + FLOATS)
    op = draw.choice(NUMERIC + (BITWISE if dtype in INTEGERS else []))
    shape = draw.choice(SHAPES)
    salt = draw.random.randrange(1 << 20)
    root = draw.choice(draw.ranks)
    layout = draw.choice(LAYOUTS)
    is_async = draw.random.random() < 0.4

    def make(of=shape, n=0, rank=None, layout=layout):
        return draw.tensor(of, dtype, layout, salt + n, rank)

    what = f"{name} {dtype} {shape} {layout} {op} root {root} {'async' if is_async else ''}"
    return what, lambda: CALLS[name](draw, make, shape, op, root, is_async)


def all_reduce(draw, make, shape, op, root, is_async):
    own = make()
    return dist.all_reduce(own, op, group=draw.group, async_op=is_async), [own]


def reduce(draw, make, shape, op, root, is_async):
    own = make()
    work = dist.reduce(own, root, op, group=draw.group, async_op=is_async)
    return work, [own] if dist.get_rank() == root else []


def broadcast(draw, make, shape, op, root, is_async):
    own = make()
    return dist.broadcast(own, root, group=draw.group, async_op=is_async), [own]


def all_gather(draw, make, shape, op, root, is_async):
    out = [make(n=9) for _ in draw.ranks]
    own = make()
    return dist.all_gather(out, own, group=draw.group, async_op=is_async), [own, *out]


def all_gather_into_tensor(draw, make, shape, op, root, is_async):
    shape = shape or (1,)
    out = make((len(draw.ranks) * shape[0], *shape[1:]), 9, layout="plain")
    own = make(shape, layout="plain")
    if draw.choice([True, False]):  # in place
        own = out[draw.own * shape[0] : (draw.own + 1) * shape[0]]
    return dist.all_gather_into_tensor(out, own, group=draw.group, async_op=is_async), [out]


def gather(draw, make, shape, op, root, is_async):
    out = [make(n=9) for _ in draw.ranks] if dist.get_rank() == root else None
    own = make()
    return dist.gather(own, out, root, group=draw.group, async_op=is_async), [own, *(out or [])]


def scatter(draw, make, shape, op, root, is_async):
    parts = [make(n=i) for i, _ in enumerate(draw.ranks)] if dist.get_rank() == root else None
    out = make(n=99)
    return dist.scatter(out, parts, root, group=draw.group, async_op=is_async), [out]


def reduce_scatter(draw, make, shape, op, root, is_async):
    parts = [make(n=i) for i, _ in enumerate(draw.ranks)]
    out = make(n=99)
    return dist.reduce_scatter(out, parts, op, group=draw.group, async_op=is_async), [out]


def reduce_scatter_tensor(draw, make, shape, op, root, is_async):
    shape = shape or (1,)
    whole = make((len(draw.ranks) * shape[0], *shape[1:]), layout="plain")
    out = make(shape, 9, layout="plain")
    return dist.reduce_scatter_tensor(out, whole, op, group=draw.group, async_op=is_async), [out]


def all_to_all_single(draw, make, shape, op, root, is_async):
    """With rows of other counts for each pair of ranks."""
    rest = shape[1:]
    rows = [[draw.random.randrange(4) for _ in draw.ranks] for _ in draw.ranks]
    gives = rows[draw.own]
    takes = [row[draw.own] for row in rows]
    out = make((sum(takes), *rest), 9, layout="plain")
    own = make((sum(gives), *rest), layout="plain")
    return dist.all_to_all_single(out, own, takes, gives, group=draw.group, async_op=is_async), [out]


def all_to_all(draw, make, shape, op, root, is_async):
    parts = [make(n=i, layout="plain") for i, _ in enumerate(draw.ranks)]
    out = [make(n=99, layout="plain") for _ in draw.ranks]
    return dist.all_to_all(out, parts, group=draw.group, async_op=is_async), out


def ring(draw, make, shape, op, root, is_async):
    """Each rank sends to the next one, with or without a batch."""
    size = len(draw.ranks)
    batched = draw.choice([True, False])
    tag = 0 if batched else draw.random.randrange(5)
    if size == 1:
        return None, []
    after, before = draw.ranks[(draw.own + 1) % size], draw.ranks[(draw.own - 1) % size]
    own, out = make(layout="plain"), make(n=9, layout="plain")
    if batched:
        ops = [dist.P2POp(dist.isend, own, after, draw.group), dist.P2POp(dist.irecv, out, before, draw.group)]
        works = dist.batch_isend_irecv(ops)
    else:
        works = [dist.isend(own, after, draw.group, tag=tag), dist.irecv(out, before, draw.group, tag=tag)]
    for work in works if draw.choice([True, False]) else works[::-1]:
        work.wait()
    return None, [out]


def objects(draw, make, shape, op, root, is_async):
    out = [None] * len(draw.ranks)
    dist.all_gather_object(out, {"rank": draw.own, "values": make().tolist()}, group=draw.group)
    given = [draw.own, "x" * draw.random.randrange(100)]
    dist.broadcast_object_list(given, root, group=draw.group)
    return None, [torch.tensor([len(str(out)), given[0], len(given[1])])]


def barrier(draw, make, shape, op, root, is_async):
    return dist.barrier(group=draw.group, async_op=is_async), []


def wrong(draw, make, shape, op, root, is_async):
    """What all ranks get wrong alike."""
    out = [make((3,)) for _ in range(len(draw.ranks) + 1)]
    return dist.all_gather(out, make((3,)), group=draw.group, async_op=is_async), []


CALLS = {
    call.__name__: call
    for call in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
        reduce_scatter_tensor, all_to_all_single, all_to_all, ring, objects, barrier, wrong,
    )
}  # fmt: skip


def ends(backend, seed, most):
    """What each call of a sequence leaves on this rank, or the kind of its error."""
    chosen = Random(seed)
    named = groups(backend)
    name = chosen.choice([*named])
    count = chosen.randint(1, most)
    if named[name] is None:
        return []
    draw = Drawing(seed, backend, named[name])
    found, works = [], []
    for place in range(count):
        is_dropped, waits_now = (chosen.random() < 0.3 for _ in range(2))
        draw.random = Random(f"{seed} {place}")  # a call that fails leaves later ones as they are
        what, call = draw_call(draw)
        try:
            work, results = call()
        except Exception as error:  # compared
            found.append((what, error))
            continue
        found.append((what, results))
        if work is not None and not (is_dropped and backend == "commrt"):  # Gloo's barrier waits for no dropped work
            works.append(work)
        if waits_now:
            wait_for_all(works, draw.random)
    wait_for_all(works, draw.random)
    dist.barrier(group=draw.group)  # after what was dropped
    return found


def wait_for_all(works, random):
    random.shuffle(works)
    while works:
        works.pop().wait()


def is_same(ours, theirs):
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, theirs)
    loose = LOOSE[ours.dtype]
    return torch.allclose(ours.double(), theirs.double(), rtol=loose, atol=loose, equal_nan=True)


def differences(seed, most=20):
    """What commrt did otherwise than Gloo in a sequence: ``(call, what)``."""
    said = []
    for (what, ours), (_, theirs) in zip(ends("commrt", seed, most), ends("gloo", seed, most), strict=True):
        if isinstance(theirs, Exception):
            continue  # commrt may take what Gloo refuses
        if isinstance(ours, Exception):
            said.append((seed, what, repr(ours)[:300]))
        elif not all(map(is_same, ours, theirs)):
            said.append((seed, what, f"{ours} against {theirs}"[:600]))
    return said


def in_place(x, group, size):
    y = x + 1
    dist.all_reduce(y, group=group)
    return y


COMPILED = [
    lambda x, group, size: functional.all_reduce(x, "sum", group),
    lambda x, group, size: functional.all_reduce(x.view(size, -1).t(), "max", group).reshape(-1),
    lambda x, group, size: functional.all_gather_tensor(x[1:], 0, group)[-len(x) :],
    lambda x, group, size: functional.reduce_scatter_tensor(x, "sum", 0, group).repeat(size),
    lambda x, group, size: functional.all_to_all_single(x, None, None, group),
    lambda x, group, size: functional.broadcast(x, 0, group),
    in_place,
    lambda x, group, size: x.mul_(2),
    lambda x, group, size: x.view(-1, size).t().reshape(-1) - 3,
]
"""Each makes a tensor of another one, as long; of whole numbers, so that all sums are exact."""


def compiled_ends(backend, seed):
    """What a compiled function of drawn calls, each of what one before has left, leaves on this rank, twice."""
    chosen = Random(seed)
    named = groups(backend)
    group = named[chosen.choice([*named])]
    if group is None:
        return []
    size, own = group.size(), group.rank()
    calls = [(chosen.choice(COMPILED), chosen.randrange(place + 1)) for place in range(chosen.randint(1, 8))]
    dtype = chosen.choice([torch.float64, torch.int64, torch.float32])
    compiler = "aot_eager" if seed % 10 < 9 or what_inductor_lacks() else "inductor"

    def call_all(x):
        made = [x * 1]
        for call, place in calls:
            made.append(call(made[place], group, size))
        return made

    torch._dynamo.reset()
    compiled = torch.compile(call_all, backend=compiler, fullgraph=True)
    x = torch.arange(4 * size, dtype=dtype) + own
    return [each.clone() for given in (x, x + 1) for each in compiled(given)]


def compiled_differences(seed):
    found = {backend: compiled_ends(backend, seed) for backend in ("commrt", "gloo")}
    return [] if all(map(torch.equal, *found.values())) else [(seed, found)]


def compare(_, find, first, count):
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    groups.cache_clear()
    groups("commrt"), groups("gloo")
    return [each for seed in range(first, first + count) for each in find(seed)]
