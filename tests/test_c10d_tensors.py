# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed on tensors of all dtypes, layouts and sizes, with all operations."""

from __future__ import annotations

import c10d_layouts
import c10d_operations
import c10d_ranks
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes
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
    with Pool(RANKS) as pool:
        return c10d_ranks.answers(pool, *BODIES)


@pytest.mark.slow
def test_an_operation_gives_what_plain_torch_gives_in_every_dtype(found):
    assert found["reductions"] == [[]] * RANKS


def test_an_operation_that_a_dtype_does_not_have_is_refused(found):
    assert found["refusals"] == [[]] * RANKS


def test_a_mean_of_integers_is_the_wrapped_sum_divided_and_rounded_towards_zero(found):
    for got in found["means_of_integers"]:
        assert got == [[-5, 31]] * len(got)  # of -21, and of 3 * 127 - 256


def test_tensors_of_any_layout_and_size_get_their_values_and_nothing_between_them(found):
    assert found["layouts"] == [[]] * RANKS


def test_calls_that_are_longer_than_the_wire_give_the_same(found):
    assert found["slices"] == [[]] * RANKS


def test_a_caller_in_inference_mode_gets_the_same(found):
    assert found["inside"] == [[]] * RANKS


def test_elements_of_every_dtype_move_as_they_are(found):
    assert found["dtypes"] == [[]] * RANKS
