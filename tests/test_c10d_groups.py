# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed in several groups, its works and futures, and what travels between two ranks."""

from __future__ import annotations

import c10d_groups
import c10d_ranks
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

RANKS = 4
SUM = [10.0] * 3
"""Of what the four ranks have."""
SUMMING = [
    c10d_groups.meshed,
    c10d_groups.interleaved,
    c10d_groups.of_some,
    c10d_groups.of_two_devices,
    c10d_groups.alone,
]
OTHERS = [
    c10d_groups.unsorted,
    c10d_groups.after_a_group,
    c10d_groups.late,
    c10d_groups.result,
    c10d_groups.futures,
    c10d_groups.all_gather_object,
    c10d_groups.gather_object,
    c10d_groups.broadcast_object_list,
    c10d_groups.scatter_object_list,
    c10d_groups.send_object_list,
    c10d_groups.tags,
    c10d_groups.around,
    c10d_groups.from_any,
    c10d_groups.monitored_barrier,
    c10d_groups.after_the_world,
]
THINGS = [c10d_groups.thing(rank) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def found():
    with Pool(RANKS) as pool:
        return c10d_ranks.answers(pool, *SUMMING, *OTHERS)


@pytest.mark.parametrize("body", SUMMING, ids=lambda body: body.__name__)
def test_each_group_adds_up_what_its_own_ranks_have(found, body):
    for got, expected in found[body.__name__]:
        assert got == expected


def test_a_group_keeps_the_order_in_which_its_ranks_were_named(found):
    assert found["unsorted"] == [[3, 1, 0], [3, 1, 0], True, [3, 1, 0]]


def test_a_destroyed_group_is_refused_and_others_go_on(found):
    for said, another, world in found["after_a_group"]:
        assert "is not initialized in the world group map" in said
        assert (another, world) == (SUM, SUM)


def test_a_world_is_opened_again_after_its_end_on_the_same_store(found):
    assert found["after_the_world"] == [(SUM, SUM)] * RANKS


def test_a_wait_that_ends_first_leaves_the_collective_under_way(found):
    before, said, completed, success, tensor = found["late"][0]
    assert (before, completed, success, tensor) == (False, True, True, SUM)
    assert said.startswith("DeadlineExceeded: all_reduce (sum) of float32[")
    assert "] is still in flight after 0.05 s: wait() again" in said
    assert found["late"][1:] == [SUM] * 3


def test_the_result_of_a_work_is_the_caller_s_tensor(found):
    assert found["result"] == [(SUM, True)] * RANKS


def test_callbacks_of_futures_see_the_results(found):
    assert found["futures"] == [[30.0] * 3] * RANKS


def test_objects_are_gathered_at_all_ranks(found):
    assert found["all_gather_object"] == [THINGS] * RANKS


def test_objects_are_gathered_at_one_rank(found):
    assert found["gather_object"] == [None, None, THINGS, None]


def test_objects_of_one_rank_reach_all(found):
    assert found["broadcast_object_list"] == [[THINGS[1], THINGS[3]]] * RANKS


def test_objects_of_one_rank_reach_one_rank_each(found):
    assert found["scatter_object_list"] == THINGS


def test_objects_are_sent_to_one_rank(found):
    assert found["send_object_list"] == [THINGS[0], THINGS[0], THINGS[2], THINGS[2]]


def test_messages_are_received_by_tag_in_any_order(found):
    assert found["tags"] == [{}, {tag: tag for tag in range(4)}, {}, {}]


def test_all_ranks_send_and_receive_at_once(found):
    assert found["around"] == [[4.0] * 3, [1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_a_receive_from_any_rank_names_it(found):
    assert found["from_any"] == [{rank: [rank + 1.0] * 3 for rank in (1, 2, 3)}, {}, {}, {}]


def test_torch_refuses_a_monitored_barrier_that_the_group_itself_makes(found):
    assert found["monitored_barrier"] == ["ValueError: monitored_barrier is only implemented for GLOO backend."] * RANKS
