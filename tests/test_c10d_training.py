# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under what trains with it: DDP, FSDP2, HSDP, DTensor, torch.compile."""

from __future__ import annotations

import c10d_ranks
import c10d_tensors
import c10d_training
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

RANKS = 4
WAYS = [c10d_training.ddp, c10d_training.fsdp2, c10d_training.hsdp]
HOOKED = [c10d_training.two_replicas, c10d_training.four_replicas]
TENSORS = [
    c10d_tensors.products,
    c10d_tensors.changes,
    c10d_tensors.after_functional,
    c10d_tensors.dtensor_refused,
    c10d_tensors.counted_by_autograd,
]


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS) as pool:
        yield pool


@pytest.fixture(scope="module")
def found(pool):
    return c10d_ranks.answers(pool, *TENSORS)


def test_a_transformer_ends_with_the_parameters_of_one_process_on_whole_batches(pool):
    distances = c10d_ranks.answers(pool, *WAYS)
    assert {way: max(by_rank) for way, by_rank in distances.items() if max(by_rank) > 1e-6} == {}


def test_a_hook_of_fsdp2_averages_the_replicas_whatever_the_mesh(pool):
    distances = c10d_ranks.answers(pool, *HOOKED, backend="gloo")
    assert {way: max(by_rank) for way, by_rank in distances.items() if max(by_rank) > 1e-6} == {}


def test_the_product_of_dtensors_in_all_placements_is_that_of_the_plain_tensors(found):
    assert found["products"] == [[]] * RANKS


def test_a_dtensor_changes_from_any_placements_to_any_others(found):
    assert found["changes"] == [[]] * RANKS


def test_a_functional_collective_gives_what_it_should(pool):
    assert c10d_ranks.answers(pool, c10d_tensors.functions, size=2) == {"functions": [[]] * 2}


def test_the_result_of_a_functional_collective_is_waited_for_before_it_travels_again(found):
    assert found["after_functional"] == [("AsyncCollectiveTensor", [16.0] * 3, [4.0] * 3)] * RANKS


def test_a_dtensor_is_refused_by_a_collective_of_plain_tensors(found):
    for said in found["dtensor_refused"]:
        assert said.startswith("a DTensor cannot travel: pass the tensor in it")


def test_a_collective_counts_as_no_change_in_place_for_autograd(found):
    assert found["counted_by_autograd"] == [(0, [8.0] * 4)] * RANKS
