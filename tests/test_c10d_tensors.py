# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed on tensors of all dtypes, layouts and sizes, with all operations."""

from __future__ import annotations

import c10d_layouts
import c10d_operations
import c10d_ranks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from commrt.algorithms.catalogue import candidates
from commrt.c10d.call_engine import Engine
from commrt.c10d.requests import Requests
from commrt.cost.cluster import Cluster
from commrt.cost.selection import Selection
from commrt.testing.ranks import run_ranks

RANKS = 4
BODIES = [
    c10d_operations.reductions,
    c10d_operations.refusals,
    c10d_operations.means_of_integers,
    c10d_layouts.layouts,
    c10d_layouts.slices,
    c10d_layouts.inside,
    c10d_layouts.dtypes,
]


@pytest.fixture(scope="module")
def found():
    return c10d_ranks.answers(RANKS, *BODIES)


def by_rank(found, body, key):
    return [answers[key] for answers in found[body.__name__]]


@pytest.mark.processes
@pytest.mark.parametrize("name", c10d_operations.PLAIN)
@pytest.mark.parametrize("call", [call.__name__ for call in c10d_operations.CALLS])
def test_an_operation_gives_what_plain_torch_gives_in_every_dtype(found, call, name):
    assert by_rank(found, c10d_operations.reductions, (call, name)) == [[]] * RANKS


@pytest.mark.processes
@pytest.mark.parametrize("name", c10d_operations.PLAIN)
def test_an_operation_that_a_dtype_does_not_have_is_refused(found, name):
    assert by_rank(found, c10d_operations.refusals, name) == [[]] * RANKS


@pytest.mark.processes
def test_a_mean_of_integers_is_the_wrapped_sum_divided_and_rounded_towards_zero(found):
    for got in found["means_of_integers"]:
        assert got == [[-5, 31]] * len(got)  # of -21, and of 3 * 127 - 256


@pytest.mark.processes
@pytest.mark.parametrize("layout", [layout.__name__ for layout in c10d_layouts.LAYOUTS])
def test_tensors_of_any_layout_and_size_get_their_values_and_nothing_between_them(found, layout):
    assert by_rank(found, c10d_layouts.layouts, layout) == [[]] * RANKS


@pytest.mark.processes
def test_calls_that_are_longer_than_the_wire_give_the_same(found):
    assert found["slices"] == [[]] * RANKS


@pytest.mark.processes
def test_a_caller_in_inference_mode_gets_the_same(found):
    assert found["inside"] == [[]] * RANKS


@pytest.mark.processes
@pytest.mark.parametrize("call", [call.__name__ for call in c10d_layouts.MOVING])
def test_elements_of_every_dtype_move_as_they_are(found, call):
    assert by_rank(found, c10d_layouts.dtypes, call) == [[]] * RANKS


def along(world, collective, name):
    """The engine and the requests of a rank, on a schedule of this name."""
    selection = Selection(Cluster.named("host"), range(world.size), {collective: name})
    return Engine(world, selection, "test"), Requests(world.rank, world.size)


def numbered(rank, ranks, numel):
    """[ranks, numel]: what `rank` has for each of `ranks`, with whole sums."""
    return (torch.arange(ranks * numel) + 10_000 * rank).view(ranks, numel)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(0, 100), st.data())
def test_an_all_gather_puts_each_rank_s_tensor_in_its_own_place_along_any_schedule(size, numel, data):
    name = data.draw(st.sampled_from(sorted(candidates("all_gather", size))))
    expected = torch.cat([numbered(rank, 1, numel)[0] for rank in range(size)])

    def body(world):
        engine, requests = along(world, "all_gather", name)
        output = torch.full((size * numel,), -1)
        engine.begin(requests.all_gather(output, numbered(world.rank, 1, numel)[0])).result()
        assert torch.equal(output, expected)

    run_ranks(size, body)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(0, 100), st.data())
def test_a_reduce_scatter_adds_up_each_rank_s_own_part_along_any_schedule(size, numel, data):
    name = data.draw(st.sampled_from(sorted(candidates("reduce_scatter", size))))
    expected = sum(numbered(rank, size, numel) for rank in range(size))

    def body(world):
        engine, requests = along(world, "reduce_scatter", name)
        output = torch.full((numel,), -1)
        engine.begin(requests.reduce_scatter(output, numbered(world.rank, size, numel).view(-1), ReduceOp.SUM)).result()
        assert torch.equal(output, expected[world.rank])

    run_ranks(size, body)
