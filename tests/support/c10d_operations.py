# SPDX-License-Identifier: Apache-2.0
"""All operations on all dtypes, and tensors of all kinds, beside what plain torch makes of all ranks' tensors."""

from __future__ import annotations

from functools import reduce
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
NUMEL = 37
"""Of each tensor: no multiple of anything."""
FACTOR = 0.5


def mean(tensors):
    """That of integers is rounded towards zero; booleans have none."""
    total = reduce(torch.add, tensors)
    is_integer = not (total.is_floating_point() or total.is_complex() or total.dtype is torch.bool)
    return torch.div(total, len(tensors), rounding_mode="trunc" if is_integer else None)


def combined(combine):
    return lambda tensors: reduce(combine, tensors)


PLAIN = {
    "SUM": combined(torch.add),
    "AVG": mean,
    "MIN": combined(torch.minimum),
    "MAX": combined(torch.maximum),
    "PRODUCT": combined(torch.mul),
    "BAND": combined(torch.bitwise_and),
    "BOR": combined(torch.bitwise_or),
    "BXOR": combined(torch.bitwise_xor),
    "PREMUL_SUM": lambda tensors: reduce(torch.add, [tensor * FACTOR for tensor in tensors]),
}
LINEAR = {"SUM", "AVG", "PREMUL_SUM"}
"""Those that torch.distributed lets complex tensors have."""


def operation(name):
    return dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def exists(name, dtype):
    """Whether tensors of this dtype can be combined so, and the result has a place in the dtype."""
    if dtype.is_complex and name not in LINEAR:
        return False
    try:
        return PLAIN[name]([torch.ones(1, dtype=dtype)] * 2).dtype == dtype
    except RuntimeError:
        return False


def numbers(rank, dtype, numel=NUMEL):
    """Small whole numbers, so that no result is rounded, whatever the order."""
    source = torch.Generator().manual_seed(rank)
    real, imaginary = torch.randint(1, 4, (2, numel), generator=source)
    least = -2 if dtype.is_signed else 0
    return torch.complex(real.float(), imaginary.float()) if dtype.is_complex else (real % 3 + least).to(dtype)


def all_reduce(name, dtype):
    tensor = numbers(dist.get_rank(), dtype)
    dist.all_reduce(tensor, operation(name))
    return tensor, PLAIN[name](everyone(dtype))


def reduce_to_one(name, dtype):
    """At the last rank but one; elsewhere the tensor is undefined."""
    tensor, root = numbers(dist.get_rank(), dtype), 2
    dist.reduce(tensor, root, operation(name))
    expected = PLAIN[name](everyone(dtype))
    return tensor if dist.get_rank() == root else expected, expected


def reduce_scatter(name, dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    output = torch.zeros(NUMEL, dtype=dtype)
    inputs = numbers(rank, dtype, size * NUMEL)
    dist.reduce_scatter_single(output, inputs, operation(name))
    return output, PLAIN[name](everyone(dtype, size * NUMEL))[rank * NUMEL : (rank + 1) * NUMEL]


def everyone(dtype, numel=NUMEL):
    return [numbers(rank, dtype, numel) for rank in range(dist.get_world_size())]


CALLS = [all_reduce, reduce_to_one, reduce_scatter]


def means_of_integers():
    """Of -7 and of the greatest number at each rank but the first, by each call that can form them."""
    group, size = dist.group.WORLD, dist.get_world_size()
    own = torch.tensor([-7, 127] if dist.get_rank() else [0, 0], dtype=torch.int8)
    alone, one, two = own.clone(), torch.empty_like(own), torch.empty_like(own)
    dist.all_reduce(alone, dist.ReduceOp.AVG)
    dist.reduce_scatter(one, [own.clone() for _ in range(size)], dist.ReduceOp.AVG)
    dist.reduce_scatter_single(two, own.repeat(size), dist.ReduceOp.AVG)
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    together = [own.clone(), own.clone()]
    group.allreduce_coalesced(together, options).wait()
    found = [
        alone,
        one,
        two,
        *together,
        functional.all_reduce(own, "avg", group),
        functional.reduce_scatter_single(own.repeat(size), "avg", 0, group),
        *functional.all_reduce_coalesced([own, own], "avg", group),
        *functional.reduce_scatter_single_coalesced([own.repeat(size)], "avg", [0], group),
    ]
    return [tensor.tolist() for tensor in found]


def reductions():
    """The (call, operation, dtype) that do not give what plain torch gives: each pair of these three is tried."""
    return [
        f"{call.__name__}, {name}, {dtype}"
        for (number, name), (other, dtype) in product(enumerate(PLAIN), enumerate(DTYPES))
        if exists(name, dtype) and not torch.equal(*(call := CALLS[(number + other) % len(CALLS)])(name, dtype))
    ]


def refusals():
    """The (operation, dtype) that do not exist, and are not refused."""
    missing = [(name, dtype) for name, dtype in product(PLAIN, DTYPES) if not exists(name, dtype)]
    return [f"{name}, {dtype}" for name, dtype in missing if not is_refused(name, dtype)]


def is_refused(name, dtype):
    try:
        all_reduce(name, dtype)
    except ValueError:
        return True
    return False
