# SPDX-License-Identifier: Apache-2.0
"""The same contributions give the same bits: as before, and in one order wherever they lie and however they are cut."""

import json
from functools import reduce

import bits
import pytest
import torch
from cases import on_ranks, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import Pool
from torch import nn
from training_ranks import trained_in_buckets
from transports import gloo, local, nccl, pairs_on_a_host, peers, shared, two_hosts_in_turn

import commrt
from commrt import Direct
from commrt.algorithms import DoubleTree
from commrt.algorithms.catalogue import ALGORITHMS, SUMS, by_name, candidates
from commrt.errors import UsageError
from commrt.pricing.forced import parse_forced
from commrt.proof import order_of_additions
from commrt.schedule import ADD, MIX, Schedule, Step
from commrt.testing.ranks import run_ranks

SAMPLES = 64
"""Elements whose contributions are put into every tensor: enough for one sum in two orders to differ."""
LARGEST = 10**6
TRANSPORTS = (local, gloo, shared, pairs_on_a_host, two_hosts_in_turn, nccl, peers)
"""The last one reads what peers send in their memory."""


@pytest.mark.parametrize("case", bits.CASES)
def test_bits_are_those_of_the_file(case):
    """After a change that is meant to change them, ``python dev/bits.py`` writes the file."""
    assert bits.digest(case) == json.loads(bits.FILE.read_text())[case]


def contributions(ranks, dtype):
    """[ranks, SAMPLES]"""
    return torch.randn(ranks, SAMPLES, generator=torch.Generator().manual_seed(ranks)).to(dtype)


def sums_of(schedule, numel, begin, dtype, samples=SAMPLES):
    """What rank 0 has for the first samples after `schedule`, if they lie in a tensor of `numel` from `begin` on."""
    given = contributions(schedule.ranks, dtype)

    def body(world):
        buffer = torch.full((numel,), float(world.rank), dtype=dtype)
        buffer[begin : begin + samples] = given[world.rank, :samples]
        world.run(schedule, buffer)
        return buffer[begin : begin + samples].clone()

    return run_ranks(schedule.ranks, body)[0]


NAMED = [(name, each) for name in SUMS for ranks in (2, 3, 4, 5, 8) for each in candidates(name, ranks).values()]
OF_ONE_ORDER = [(name, each) for name, each in NAMED if order_of_additions(each).is_one]


def whole(collective, schedule, numel):
    """The elements of a buffer whose first `numel` are summed at rank 0; collectives but one need equal chunks."""
    if collective == "all_reduce":
        return numel
    return numel * schedule.chunks if collective == "reduce_scatter" else -(-numel // schedule.chunks) * schedule.chunks


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(OF_ONE_ORDER), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.data())
def test_a_sum_does_not_depend_on_the_size_of_its_tensor_or_on_its_place_there(named, dtype, data):
    collective, schedule = named
    largest = LARGEST // (schedule.chunks if collective == "reduce_scatter" else 1)
    numel = data.draw(st.one_of(st.integers(SAMPLES, 2000), st.integers(SAMPLES, largest)))
    begin = data.draw(st.integers(0, numel - SAMPLES))
    alone = sums_of(schedule, whole(collective, schedule, SAMPLES), 0, dtype)
    assert torch.equal(sums_of(schedule, whole(collective, schedule, numel), begin, dtype), alone)
    if collective == "all_reduce":
        assert torch.equal(sums_of(schedule, 1, 0, dtype, samples=1), alone[:1])


SHAPES = [(50, 30), (7,), (1,), (3, 5, 11), (2000,), (1,)]


def gradients_of(rank):
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=source) for shape in SHAPES]


def averages(world, **options):
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)
    replica = commrt.attach(model, None, Direct(), world=world, same_bits=True, **options)
    products = zip(model, gradients_of(world.rank), strict=True)
    sum((param * gradient).sum() for param, gradient in products).backward()
    replica.detach()
    return torch.cat([param.grad.flatten() for param in model])


@pytest.mark.parametrize(
    ("connect", "wire", "ranks"),
    pairwise(TRANSPORTS, (None, torch.bfloat16), (3, 4)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_average_has_the_same_bits_in_buckets_of_any_size(connect, wire, ranks):
    def body(world):
        found = [averages(world, wire=wire, bucket_cap_mb=cap_mb) for cap_mb in (1e-5, 1e-3, 0.007, 25.0)]
        if wire is None:
            found.append(averages(world, bucket_cap_mb=0.003, gradients="views"))
        return found

    travels = wire or torch.float32
    given = [torch.cat([part.flatten() for part in gradients_of(rank)]) for rank in range(ranks)]
    scaled = [each / ranks if ranks == 4 else each * (1 / ranks) for each in given]
    expected = reduce(torch.add, [each.to(travels).float() for each in scaled]).to(travels).float()
    for found in run_ranks(ranks, body, connect=lambda _, ranks, timeout_s: connect(ranks, timeout_s)):
        assert all(torch.equal(each, expected) for each in found)


@on_ranks(2)
def test_join_is_refused_as_a_rank_that_leaves_changes_every_sum(world):
    replica = commrt.attach(nn.Linear(3, 2), None, Direct(), world=world, same_bits=True)
    with pytest.raises(UsageError, match=r"join\(\) with same_bits=True: a rank that leaves changes every sum"):
        replica.join().__enter__()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("variable", "value", "steps", "same"),
    [("COMMRT_SAME_BITS", "1", 10, True), ("COMMRT_SCHEDULES", "all_reduce=ring", 3, False)],
)
def test_a_ddp_model_has_the_same_bits_after_ten_steps_with_buckets_of_any_size(
    variable, value, steps, same, monkeypatch
):
    monkeypatch.setenv(variable, value)
    with Pool(3) as pool:
        found = [pool.values(trained_in_buckets, cap_mb, steps, limit_s=200)[0] for cap_mb in (1, 5, 25)]
    assert (found[0] == found[1] == found[2]) == same


def test_a_schedule_that_is_asked_for_beside_the_same_bits_is_refused():
    with pytest.raises(UsageError, match="COMMRT_SAME_BITS with all_reduce=ring: sums are direct then"):
        parse_forced("broadcast=tree,all_reduce=ring", same_bits=True)


# In which order schedules add: one order for all elements, or several, and then two chunks that differ.


def test_sums_within_hosts_first_have_one_order_too():
    for algorithm, ranks in ((Direct(within=2), 8), (Direct(within=4), 12), (DoubleTree(within=2), 4)):
        assert order_of_additions(algorithm.schedule(0, ranks)).is_one, algorithm


@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "all_to_all", "gather", "scatter"])
def test_what_only_copies_adds_nothing(collective):
    for schedule in candidates(collective, 6).values():
        assert str(order_of_additions(schedule)) == "adds nothing"


def ends_of(schedule, draws):
    """What ranks hold after `schedule` if all chunks begin alike, [ranks, chunks, draws]."""

    def body(world):
        source = torch.Generator().manual_seed(world.rank)
        buffer = torch.randn(draws, generator=source).repeat(schedule.chunks)
        world.run(schedule, buffer)
        return buffer.view(schedule.chunks, draws)

    return torch.stack(run_ranks(schedule.ranks, body))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_chunks_with_equal_contributions_end_with_equal_bits_exactly_where_there_is_one_order(name):
    for ranks in (3, 4, 5, 6):
        schedule = by_name(name).schedule(0, ranks)
        ends, found = ends_of(schedule, 400), order_of_additions(schedule)
        assert bool((ends == ends[:1, :1]).all()) == found.is_one, ranks
        if not found.is_one:
            one, other = found.chunks
            assert (ends[0, one] != ends[0, other]).any(), "the chunks that are named differ"


def test_ranges_that_one_message_carries_are_added_as_one():
    """Rank 0 receives chunks 0 and 1 of rank 1 as one range, after chunk 0 of rank 2 alone."""
    step = Step.of([1, 1, 2], 0, [0, 1, 0], [1, 2, 1], ADD)
    schedule = Schedule("merged", 3, 2, lambda: iter([step]))
    assert str(order_of_additions(schedule)) == "one order for all elements: (1 + (0 + 2))"


def test_an_order_is_shown_as_sums_in_brackets():
    chain = Schedule("chain", 3, 1, lambda: iter([Step.of([2], [1], 0, 1, ADD), Step.of([1], [0], 0, 1, ADD)]))
    assert str(order_of_additions(chain)) == "one order for all elements: (0 + (1 + 2))"
    at_once = Schedule("at once", 3, 1, lambda: iter([Step.of([1, 2], [0, 0], 0, 1, ADD)]))
    assert str(order_of_additions(at_once)) == "one order for all elements: (0 + 1 + 2)"


def test_a_schedule_that_mixes_has_no_sum():
    half = Schedule("half", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, MIX, 0.5)]))
    with pytest.raises(UsageError, match="half mixes, so what ranks end with is no sum"):
        order_of_additions(half)
