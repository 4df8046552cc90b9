# SPDX-License-Identifier: Apache-2.0
"""Every collective of the backend, along every schedule, on tensors of any dtype, layout and size."""

from functools import partial, reduce
from itertools import product

import pytest
import torch
from c10d_calls import LAYOUTS, options, request, values, wrong_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp, _make_nccl_premul_sum
from transports import over_nccl

from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.c10d import call_engine, call_plans
from commrt.c10d.checked_calls import CheckedCalls
from commrt.errors import UsageError
from commrt.testing.ranks import over_threads

CONNECTED = {"threads": over_threads, "nccl": over_nccl}
NUMEL = 37
"""No multiple of anything."""
RANKS = 4
FACTOR = 0.5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64]
SHAPES = [(2, 0, 4, 5), (1, 1, 1, 1), (2, 3, 4, 5), (4, 8, 40, 40)]
"""Of none, of one, of few elements, and of so many that they are received in place."""
SUMS = ["all_reduce", "reduce", "reduce_scatter"]
MOVING = ["broadcast", "all_gather", "gather", "scatter", "all_to_all"]


def case(collective, numel, root=0):
    """For `wrong_calls`: a call with the pieces of all ranks in one tensor."""
    if collective == "barrier":
        return lambda ask: (ask.barrier(), [])
    return partial(request, collective, x=partial(values, (numel,), torch.float32), root=root, joined=True)


@pytest.fixture
def narrow(monkeypatch):
    """A wire of 1 KB, so that calls travel in many slices; all of them may land in the caller's memory."""
    monkeypatch.setitem(call_plans.WIRE_NBYTES, "cpu", 1024)
    monkeypatch.setattr(call_plans, "LANDING_NUMEL", 1)


@pytest.mark.parametrize("connect", CONNECTED)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_gives_every_rank_what_the_collective_promises_in_one_slice_and_in_many(
    narrow, collective, connect
):
    numels = [NUMEL, NUMEL, 1000, NUMEL]  # the second call is the first one that finds its programs bound
    for name in COLLECTIVES[collective]:
        cases = {f"call {at}": case(collective, numel, root=2) for at, numel in enumerate(numels)}
        assert wrong_calls(4, cases, {collective: name}, CONNECTED[connect]) == [], name


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 9), st.integers(0, 100), st.data())
def test_any_size_on_any_number_of_ranks_along_any_schedule(collective, size, numel, data):
    name = data.draw(st.sampled_from([None, *candidates(collective, size)]))
    call = case(collective, numel, root=data.draw(st.integers(0, size - 1)))
    assert wrong_calls(size, {"call": call}, {collective: name} if name else None) == []


def test_a_receive_that_nothing_depends_on_lands_in_the_callers_memory(narrow, monkeypatch):
    copied, carry = [], call_engine._carry

    def noted(part, *given):
        copied.append([(each.elements.start, each.elements.stop) for each in part.take])
        carry(part, *given)

    monkeypatch.setattr(call_engine, "_carry", noted)
    assert wrong_calls(2, {"call": case("all_gather", 128)}, {"all_gather": "direct"}) == []
    assert sorted(copied) == [[(0, 512)], [(512, 1024)]]  # of two slots, each rank copies its own


def test_a_mean_is_divided_where_it_lands_in_the_callers_memory(narrow):
    def mean(ask):
        own = torch.full((512,), float(ask.rank))
        return ask.whole("all_reduce", own, options(op=ReduceOp.AVG)), [(own, torch.full((512,), 1.5))]

    found = [wrong_calls(4, {name: mean}, {"all_reduce": name}) for name in COLLECTIVES["all_reduce"]]
    assert found == [[]] * len(found)


def test_uneven_parts_of_an_all_to_all_meet(narrow):
    size = 3
    counts = [[0, 5, 300], [7, 1, 0], [2, 400, 16]]  # [source][target]

    def uneven(ask):
        rank, into = ask.rank, [of_one[ask.rank] for of_one in counts]
        sent = torch.cat([torch.full((numel,), 10.0 * rank + to) for to, numel in enumerate(counts[rank])])
        expected = torch.cat([torch.full((numel,), 10.0 * source + rank) for source, numel in enumerate(into)])
        output = torch.empty(sum(into))
        return ask.all_to_all_single(output, sent, into, counts[rank]), [(output, expected)]

    assert wrong_calls(size, {"uneven": uneven}) == []


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_uneven_pieces_that_all_ranks_know_meet_along_every_schedule(narrow, collective):
    numels = [300, 0, 17, 1000]

    def uneven(ask):
        own = torch.full((numels[ask.rank],), ask.rank + 1.0)
        if collective == "all_gather":
            outputs = [torch.empty(numel) for numel in numels]
            call = ask.pieces(collective, own, outputs)
            return call, [(each, torch.full_like(each, rank + 1.0)) for rank, each in enumerate(outputs)]
        inputs = [torch.full((numel,), (ask.rank + 1.0) * (rank + 1)) for rank, numel in enumerate(numels)]
        return ask.pieces(collective, own, inputs), [(own, torch.full_like(own, 10.0 * (ask.rank + 1)))]

    found = {name: wrong_calls(4, {name: uneven}, {collective: name}) for name in COLLECTIVES[collective]}
    assert not any(found.values()), found
    sizes = [[torch.empty(numel) for numel in order] for order in (numels, [300, 0, 1000, 17], [300] * 4)]
    kinds = [CheckedCalls(0, 4).pieces(collective, each[0], each).kind for each in sizes]
    assert [str(kind).partition("float32")[2] for kind in kinds] == [
        "[(4, [300, 0, 17, 1000])]",
        "[(4, [300, 0, 1000, 17])]",
        "[(4, 300)]",
    ]


REFUSED = [
    (
        lambda ask: ask.pieces("all_gather", torch.zeros(2), torch.zeros(5)),
        r"1 outputs of all_gather, float32\[5\].*: give 2 with as many elements, or one with 2 times as many",
    ),
    (lambda ask: ask.pieces("all_gather", torch.zeros(2), [torch.zeros(3)] * 2), "give 2 with as many elements"),
    (lambda ask: ask.whole("broadcast", torch.zeros(2), options(root=2)), r"rank 2 cannot be the root.*one of 0..1"),
    (lambda ask: ask.pieces("scatter", torch.zeros(2), [torch.zeros(2).double()] * 2), "must have one dtype"),
    (lambda ask: ask.all_to_all([], []), "0 inputs and 0 outputs of an all_to_all: give 2 each"),
    (lambda ask: ask.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []), "3 rows do not divide into 2"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 2], []), r"\[1, 2\].*sum up to 2 rows"),
    (lambda ask: ask.all_to_all_single(torch.zeros(2), torch.zeros(2), [2, 0], []), "4 bytes of its own.* 8"),
    (
        lambda ask: ask.all_to_all_single(torch.zeros(1).expand(2), torch.zeros(2), [], []),
        r"float32\[2\] on cpu has elements that share one place",
    ),
    (lambda ask: ask.whole("broadcast", torch.zeros(2).to_sparse()), "only all_reduce takes sparse"),
]


def test_what_cannot_work_is_refused_before_anything_is_sent():
    for make, message in REFUSED:
        with pytest.raises(UsageError, match=message):
            make(CheckedCalls(0, 2))


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
    except (RuntimeError, TypeError):  # the latter since torch 2.15
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
    for (one, collective), (other, layout) in product(enumerate([*SUMS, *MOVING]), enumerate(LAYOUTS)):
        shape = SHAPES[(one + other) % len(SHAPES)]  # each pair of these three is tried
        x = partial(values, shape, torch.float32)
        cases[f"{collective}, {layout.__name__}, {shape}"] = partial(request, collective, x=x, root=2, layout=layout)
    assert wrong_calls(RANKS, cases) == []


def test_elements_of_every_dtype_move_as_they_are():
    cases = {
        f"{collective} {dtype}": partial(request, collective, x=partial(values, (NUMEL,), dtype), root=3)
        for collective, dtype in product(MOVING, DTYPES)
    }
    assert wrong_calls(RANKS, cases) == []
