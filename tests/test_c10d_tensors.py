# SPDX-License-Identifier: Apache-2.0
"""Calls of the backend on tensors of all dtypes, layouts and sizes, with all operations, beside plain torch."""

from __future__ import annotations

from functools import partial, reduce
from itertools import product

import pytest
import torch
from c10d_calls import LAYOUTS, options, request, values, wrong_calls
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from commrt.c10d.checked_calls import CheckedCalls
from commrt.errors import UsageError

RANKS = 4
NUMEL = 37
"""No multiple of anything."""
FACTOR = 0.5
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
SHAPES = [(2, 0, 4, 5), (1, 1, 1, 1), (2, 3, 4, 5), (4, 8, 40, 40)]
"""Of none, of one, of few elements, and of so many that they are received in place."""
SUMS = ["all_reduce", "reduce", "reduce_scatter"]
MOVING = ["broadcast", "all_gather", "gather", "scatter", "all_to_all"]
COLLECTIVES = [*SUMS, *MOVING]


def mean(tensors):
    """That of integers is rounded towards zero; booleans have none."""
    total = reduce(torch.add, tensors)
    is_integer = not (total.is_floating_point() or total.is_complex() or total.dtype is torch.bool)
    return torch.div(total, len(tensors), rounding_mode="trunc" if is_integer else None)


PLAIN = {
    "SUM": partial(reduce, torch.add),
    "AVG": mean,
    "MIN": partial(reduce, torch.minimum),
    "MAX": partial(reduce, torch.maximum),
    "PRODUCT": partial(reduce, torch.mul),
    "BAND": partial(reduce, torch.bitwise_and),
    "BOR": partial(reduce, torch.bitwise_or),
    "BXOR": partial(reduce, torch.bitwise_xor),
    "PREMUL_SUM": lambda tensors: reduce(torch.add, [tensor * FACTOR for tensor in tensors]),
}


def exists(name, dtype):
    """Whether plain torch combines tensors of this dtype so, to a result that has a place in the dtype."""
    try:
        return PLAIN[name]([torch.ones(1, dtype=dtype)] * 2).dtype == dtype
    except RuntimeError:
        return False


def numbers(rank, dtype):
    """Small whole numbers, so that no result of floats is rounded; of int8, sums of the first ones overflow."""
    source = torch.Generator().manual_seed(rank)
    real, imaginary = torch.randint(1, 4, (2, RANKS * NUMEL), generator=source)
    if dtype.is_complex:
        return torch.complex(real.float(), imaginary.float())
    least = -2 if dtype.is_signed else 0
    found = (real % 3 + least).to(dtype)
    if dtype is torch.int8:
        found[:2] = torch.tensor([-7, 127]) if rank else 0
    return found


def operation(name):
    return _make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def combining(name, dtype, collective, ask):
    """A call that combines, and pairs of a result and what plain torch makes of all ranks' tensors."""
    given, expected = numbers(ask.rank, dtype), PLAIN[name]([numbers(rank, dtype) for rank in range(ask.size)])
    opts = options(op=operation(name), root=2)
    if collective == "reduce_scatter":
        out = torch.zeros(NUMEL, dtype=dtype)
        return ask.pieces(collective, out, given, opts), [(out, expected.view(RANKS, -1)[ask.rank])]
    call = ask.whole(collective, given, opts)
    return call, [(given, expected)] if collective == "all_reduce" or ask.rank == 2 else []


def test_an_operation_gives_what_plain_torch_gives_in_every_dtype():
    cases = {}
    for (one, name), (other, dtype) in product(enumerate(PLAIN), enumerate(DTYPES)):
        collective = SUMS[(one + other) % len(SUMS)]  # each pair of these three is tried
        if exists(name, dtype):
            cases[f"{collective}, {name}, {dtype}"] = partial(combining, name, dtype, collective)
    assert wrong_calls(RANKS, cases) == []


REFUSALS = {"AVG": r"mean of torch.bool has no place", "PREMUL_SUM": r"scaled sum of torch.\w+ has no place"}


def test_an_operation_that_a_dtype_does_not_have_is_refused():
    for name, dtype in product(PLAIN, DTYPES):
        if not exists(name, dtype):
            with pytest.raises(UsageError, match=REFUSALS.get(name, rf"{dtype} is not possible")):
                CheckedCalls(0, RANKS).whole("all_reduce", numbers(0, dtype), options(op=operation(name)))


def test_tensors_of_any_layout_and_size_get_their_values_and_nothing_between_them():
    cases = {}
    for (one, collective), (other, layout) in product(enumerate(COLLECTIVES), enumerate(LAYOUTS)):
        shape = SHAPES[(one + other) % len(SHAPES)]  # each pair of these three is tried
        x = partial(values, shape, torch.float32)
        cases[f"{collective}, {layout.__name__}, {shape}"] = partial(request, collective, x=x, root=2, layout=layout)
    assert wrong_calls(RANKS, cases) == []


def test_a_caller_in_inference_mode_gets_the_same():
    def in_inference_mode(collective, ask):
        with torch.inference_mode():
            return request(collective, ask, partial(values, (NUMEL,), torch.float32))

    assert wrong_calls(RANKS, {collective: partial(in_inference_mode, collective) for collective in COLLECTIVES}) == []


def test_elements_of_every_dtype_move_as_they_are():
    cases = {
        f"{collective} {dtype}": partial(request, collective, x=partial(values, (NUMEL,), dtype), root=3)
        for collective, dtype in product(MOVING, DTYPES)
    }
    assert wrong_calls(RANKS, cases) == []
