# SPDX-License-Identifier: Apache-2.0
"""Every collective of the backend over threads, on tensors of any layout, size and dtype; and what it must give."""

from math import prod

import torch
from torch.distributed import ReduceOp, ReduceOptions

from commrt.c10d.call_engine import CallEngine
from commrt.c10d.checked_calls import CheckedCalls
from commrt.pricing.cluster import Cluster
from commrt.pricing.selection import Selection
from commrt.testing.ranks import over_threads, run_ranks

HOST = Cluster.named("host")
BETWEEN = -1
"""What lies between the elements of a tensor with gaps."""


def options(*, root=0, op=ReduceOp.SUM):
    """As torch.distributed passes them."""
    options = ReduceOptions()
    options.rootRank = root
    options.reduceOp = op
    return options


def values(shape, dtype, sender, receiver=0):
    """What one rank has for another: other whole numbers for each pair, whose sums are exact in any order."""
    numbers = torch.arange(prod(shape)) + 1000 * (17 * sender + receiver)
    return (numbers % 7 > 3 if dtype is torch.bool else numbers).view(shape).to(dtype)


def flat(x):
    return x.reshape(-1) if x.numel() != 1 else x.reshape(())


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def spaced(x):
    """With another element after each one."""
    return torch.stack([x, torch.full_like(x, BETWEEN)], dim=-1)[..., 0]


def of_inference(x):
    with torch.inference_mode():
        return x.clone()


LAYOUTS = [flat, transposed, spaced, of_inference]


def request(collective, ask, x, *, root=0, layout=flat, joined=False):
    """The call of the rank that asks, on tensors ``x(sender, receiver)``, and pairs of a result and what it must be.

    The pieces of all ranks are in one tensor if they are `joined`.
    """
    rank, ranks, opts = ask.rank, range(ask.size), options(root=root)
    own, out = layout(x(rank)), layout(x(9, 9))
    if collective in {"all_reduce", "reduce", "broadcast"}:
        expected = x(root) if collective == "broadcast" else sum(map(x, ranks))
        return ask.whole(collective, own, opts), [(own, expected)] if collective != "reduce" or rank == root else []
    if collective in {"all_gather", "gather"}:
        whole, outputs = pieces((layout(x(9, 9)) for _ in ranks), joined)
        pairs = [*zip(outputs, map(x, ranks), strict=True)] if collective == "all_gather" or rank == root else []
        return ask.pieces(collective, own, whole, opts), pairs
    whole, inputs = pieces((layout(x(rank, other)) for other in ranks), joined)
    if collective == "all_to_all":
        taken, outputs = pieces((layout(x(9, 9)) for _ in ranks), joined)
        call = ask.all_to_all_single(taken, whole, [], []) if joined else ask.all_to_all(outputs, inputs)
        return call, [(output, x(other, rank)) for other, output in enumerate(outputs)]
    expected = x(root, rank) if collective == "scatter" else sum(x(other, rank) for other in ranks)
    return ask.pieces(collective, out, whole, opts), [(out, expected)]


def pieces(tensors, joined):
    """The tensors as they are, or parts of one that holds them all, after that one."""
    listed = [*tensors]
    if not joined:
        return listed, listed
    whole = torch.cat([each.view(-1) for each in listed])
    return whole, whole.view(len(listed), -1).unbind()


def is_right(tensor, expected):
    has_gaps = tensor._base is not None and tensor._base.shape == (*tensor.shape, 2)
    between = tensor._base[..., 1] if has_gaps else torch.empty(0)
    return torch.equal(tensor, expected.view(tensor.shape)) and bool((between == BETWEEN).all())


def wrong_calls(size, cases, forced=None, connect=over_threads):
    """What gives a rank a wrong result, after the rank: of `cases`, which are {name: what `ask` is called for}."""

    def body(world):
        engine, ask = CallEngine(world, Selection(HOST, range(size), forced), "test"), CheckedCalls(world.rank, size)
        return [name for name, case in cases.items() if not is_done(engine, *case(ask))]

    found = enumerate(run_ranks(size, body, connect=connect))
    return [(rank, name) for rank, names in found for name in names]


def is_done(engine, call, pairs):
    engine.begin(call).result()
    return all(is_right(*pair) for pair in pairs)
