# SPDX-License-Identifier: Apache-2.0
"""Backup workers in real processes that are slow, stopped, killed or replaced, at every place of a step."""

from __future__ import annotations

import pytest
from failing_collectives import (
    dying_in_a_disagreement,
    dying_in_a_sum,
    ends_early,
    ends_without_closing,
    late_beside_a_stopped_one,
    leaves_in_the_middle,
    missing_a_call,
    trains_on,
)
from fault_cost import Fault, RunLength, reference_holds, run_with_faults
from growth import run

import commrt
from commrt.testing.processes import run_processes

INNER = {"torus": commrt.Torus2D(), "ring": commrt.Ring()}
AT, STEPS, STOP_S = 4, 16, 12.0
pytestmark = pytest.mark.processes


def survivors(ends, dead):
    return [end for rank, end in enumerate(ends) if rank not in dead]


CASES = [
    ("slow", "backward", "torus"),
    ("stop", "backward", "torus"),
    ("stop", "reducing", "ring"),
    ("kill", "backward", "torus"),
    ("kill", "counted", "ring"),
    ("kill", "reducing", "torus"),
    ("kill", "reducing", "ring"),
    ("kill", "through", "torus"),
]
"""All of them with both: ``python tests/audits/fault_cost.py --pairs``."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where", "inner"), CASES)
def test_one_of_four_is_struck_and_no_step_is_lost_or_done_twice(kind, where, inner):
    ends = run_with_faults(4, commrt.BackupWorkers(1, INNER[inner]), [Fault(2, AT, where, kind)])
    alive = survivors(ends, [2] if kind == "kill" else [])
    assert all(end.error is None and end.value["equal"] for end in alive), [end.error for end in ends]
    reference_holds(alive, needed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Fault(2, AT, "counted", "kill"), Fault(4, AT, "reducing", "kill")),
        (Fault(2, AT, "backward", "stop"), Fault(4, AT, "reducing", "kill")),
        (Fault(2, AT, "backward", "kill"), Fault(4, AT + 1, "through", "kill")),
    ],
    ids=str,
)
def test_two_of_six_are_struck_and_no_step_is_lost_or_done_twice(first, second):
    ends = run_with_faults(6, commrt.BackupWorkers(2), [first, second], stop_s=STOP_S)
    alive = survivors(ends, [fault.rank for fault in (first, second) if fault.kind == "kill"])
    assert all(end.error is None and end.value["equal"] for end in alive), [end.error for end in ends]
    reference_holds(alive, needed=4)
    unhurt = survivors(ends, [fault.rank for fault in (first, second)])
    assert max(end.value["longest_s"] for end in unhurt) < STOP_S / 2  # they go on without the one that is stopped


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_reduction_is_not_waited_for():
    length, fault = RunLength(3 * STEPS, most_s=0.02), Fault(2, STEPS, "reducing", "stop")
    ends = run_with_faults(4, commrt.BackupWorkers(1), [fault], length, stop_s=STOP_S)
    assert all(end.error is None and end.value["equal"] for end in ends), [end.error for end in ends]
    reference_holds(ends, needed=3)
    assert max(end.value["longest_s"] for end in survivors(ends, [2])) < STOP_S / 2


def test_the_death_of_the_process_that_holds_the_store_ends_all_in_words():
    ends = run_with_faults(4, commrt.BackupWorkers(1), [Fault(0, AT, "backward", "kill")])
    errors = [str(end.error) for end in ends[1:]]
    assert all("the process that holds the store" in error for error in errors), errors


@pytest.mark.slow
def test_a_rank_that_misses_the_deadline_of_a_collective_is_evicted_and_the_others_complete_it():
    ends = run_processes(4, missing_a_call, 2, 2.0)
    assert [end.error for end in survivors(ends, {2})] == [None] * 3
    assert [end.value for end in survivors(ends, {2})] == [([4.0, 0.0], [3.0, 3.0], [3.0, 6.0])] * 3
    assert ends[2].error.startswith("Evicted: this process was evicted, and generation 1 goes on without it")


@pytest.mark.parametrize(
    "algorithm",
    [commrt.BackupWorkers(1), pytest.param(commrt.Gossip(), marks=pytest.mark.slow)],
    ids=["backup workers", "gossip"],
)
def test_a_death_as_some_have_a_sum_already_makes_no_value_count_twice(algorithm):
    ends = survivors(run_processes(4, dying_in_a_sum, algorithm, 2), {2})
    assert [(end.error, end.value) for end in ends] == [(None, [3.0])] * 3


def test_a_late_rank_that_others_wait_for_does_not_ask_a_stopped_one_for_weights_until_their_deadline():
    ends = run_processes(4, late_beside_a_stopped_one, 6.0, limit_s=100)
    assert [end.value for end in survivors(ends, {1})] == [(True, True)] * 3, [end.error for end in ends]
    assert ends[1].error.startswith("Evicted")


def test_a_death_as_ranks_disagree_leaves_the_others_disagreeing_and_the_world_going_on():
    for end in survivors(run_processes(4, dying_in_a_disagreement, 2, limit_s=60), {2}):
        assert end.error is None
        said, equal, waited_s = end.value
        assert said.startswith("lunch: rank 1 disagrees with rank 0 about dish: 'number 1' against 'number 0'. Start")
        assert equal
        assert waited_s < 15  # half of the deadline


def test_late_ranks_copy_weights_from_a_program_that_ends_without_closing_its_world():
    ends = run_processes(3, ends_without_closing)
    assert [end.error for end in ends] == [None] * 3
    assert ends[0].value[0] == 5
    assert len({end.value for end in ends}) == 1


@pytest.mark.parametrize("how", ["exit", *(pytest.param(each, marks=pytest.mark.slow) for each in ("detach", "close"))])
def test_ranks_that_leave_in_the_middle_have_not_finished(how):
    first, *_ = run_processes(3, leaves_in_the_middle, how, limit_s=60)
    assert first.error.startswith("QuorumLost: ")
    assert how != "exit" or "no world.close() before that had said that its data has ended" in first.error


@pytest.mark.slow
def test_a_death_is_noticed_although_no_step_needs_that_rank():
    ends = run_processes(3, trains_on, limit_s=60)
    assert [end.value for end in ends[:2]] == [[(2, "its process is gone")]] * 2


@pytest.mark.slow
def test_a_replacement_copies_the_weights_of_the_others_and_counts():
    """Of a rank that dies as it reduces; `test_training_under_failures_ends_and_loses_no_update` draws other places."""
    ends = run_with_faults(4, commrt.BackupWorkers(1), [Fault(2, AT, "reducing", "replace")])
    assert [end.error for end in ends] == [None] * 4
    reference_holds(ends, needed=3)
    assert all(end.value["equal"] and not end.value["lost"] for end in ends)
    assert any(2 in members and step > AT for step, members in ends[2].value["used"].items())


@pytest.mark.slow
@pytest.mark.parametrize("way", [0, "gossip", "local SGD"])
def test_ranks_come_one_dies_and_more_come_and_nothing_is_lost_or_used_twice(way):
    run(seed=4, steps=80, way=way)


@pytest.mark.slow
def test_the_holder_of_the_store_waits_for_ranks_that_train_longer_than_the_timeout():
    ends = run_processes(3, ends_early, 45)
    assert [end.error for end in ends] == [None] * 3
    assert all(end.value >= 35 for end in ends[1:])
