# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under what trains with it: DDP, FSDP2, HSDP, DTensor."""

from __future__ import annotations

import c10d_ranks
import pytest
from c10d_training import TENSORS, TRAINED, hooked
from rank_pool import Pool

pytestmark = pytest.mark.processes

RANKS = 4


@pytest.fixture(scope="module")
def found():
    with Pool(RANKS) as pool:
        over_gloo = c10d_ranks.answers(pool, hooked, backend="gloo")
        return over_gloo | c10d_ranks.answers(pool, *TENSORS, *TRAINED)


@pytest.mark.parametrize("way", [*TRAINED, hooked], ids=lambda way: way.__name__)
def test_a_model_ends_with_the_parameters_of_one_process_on_whole_batches(found, way):
    assert max(found[way.__name__]) < 1e-6


def test_a_dtensor_changes_from_any_placements_to_any_others(found):
    assert found["changes"] == [[]] * RANKS


def test_the_result_of_a_functional_collective_is_waited_for_before_it_travels_again(found):
    assert found["after_functional"] == [("AsyncCollectiveTensor", [16.0] * 3, [4.0] * 3)] * RANKS


def test_a_dtensor_is_refused_by_a_collective_of_plain_tensors(found):
    for said in found["dtensor_refused"]:
        assert said.startswith("a DTensor cannot travel: pass the tensor in it")


def test_a_collective_counts_as_no_change_in_place_for_autograd(found):
    assert found["counted_by_autograd"] == [(0, [8.0] * 4)] * RANKS
