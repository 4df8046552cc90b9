# SPDX-License-Identifier: Apache-2.0
"""Backup workers in real processes that are slow, stopped, or killed, at every place of a step."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from latecomers import (
    another_call,
    back_amid_a_call,
    back_between_parts,
    connecting_in_vain,
    dying_in_a_disagreement,
    dying_in_a_sum,
    late_beside_a_stopped_one,
    missing_a_call,
    never_through,
    slow_to_begin,
    stopped_twice_in_a_part,
)
from partings import another_call_and_on, given_up_by_all, refused_as_one_dies, refused_by_one

import commrt
from commrt.members.survival import Survival
from commrt.runtime.executor import BoundProgram
from commrt.testing.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from striking import Blow, Course, reference_holds, struck

INNER = {"torus": commrt.Torus2D(), "ring": commrt.Ring()}
AT, STEPS = 4, 40
pytestmark = pytest.mark.processes


def survivors(ends, dead):
    return [end for rank, end in enumerate(ends) if rank not in dead]


PLACES = [
    ("slow", "backward"),
    ("stop", "backward"),
    ("stop", "reducing"),
    ("kill", "backward"),
    ("kill", "counted"),
    ("kill", "reducing"),
    ("kill", "through"),
]
CASES = [*((*place, "torus") for place in PLACES), ("kill", "counted", "ring"), ("kill", "reducing", "ring")]
"""All of them with both: ``python bench/striking.py --pairs``."""


@pytest.mark.parametrize(("kind", "where", "inner"), CASES)
def test_one_of_four_is_struck_and_no_step_is_lost_or_done_twice(kind, where, inner):
    ends = struck(4, commrt.BackupWorkers(1, INNER[inner]), [Blow(2, AT, where, kind)])
    alive = survivors(ends, [2] if kind == "kill" else [])
    assert all(end.error is None and end.value["equal"] for end in alive), [end.error for end in ends]
    reference_holds(alive, needed=3)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Blow(2, AT, "counted", "kill"), Blow(4, AT, "reducing", "kill")),
        (Blow(2, AT, "backward", "stop"), Blow(4, AT, "reducing", "kill")),
        (Blow(2, AT, "backward", "kill"), Blow(4, AT + 1, "through", "kill")),
    ],
    ids=str,
)
def test_two_of_six_are_struck_and_no_step_is_lost_or_done_twice(first, second):
    ends = struck(6, commrt.BackupWorkers(2), [first, second], stop_s=4.0)
    alive = survivors(ends, [blow.rank for blow in (first, second) if blow.kind == "kill"])
    assert all(end.error is None and end.value["equal"] for end in alive), [end.error for end in ends]
    reference_holds(alive, needed=4)


def test_in_every_of_many_steps_of_real_processes_exactly_as_many_count_as_should():
    course = Course(STEPS, most_s=0.2)  # longer than weights are fetched: or who is late once stays so
    ends = struck(5, commrt.BackupWorkers(2), [], course)
    assert all(end.error is None and end.value["equal"] for end in ends), [end.error for end in ends]
    reference_holds(ends, needed=3)
    assert len({members for end in ends for members in end.value["used"].values()}) > 3


def test_one_more_than_there_are_backups_ends_all_in_words_after_a_checkpoint():
    blows = [Blow(1, AT, "backward", "kill"), Blow(2, AT, "counted", "kill")]
    ends = struck(4, commrt.BackupWorkers(1), blows)
    for end in (ends[0], ends[3]):
        assert end.error is not None
        assert "gradients make a step" in end.error
        assert any(message[0] == "giving up" for message in end.messages)


def test_the_death_of_the_process_that_holds_the_store_ends_all_in_words():
    ends = struck(4, commrt.BackupWorkers(1), [Blow(0, AT, "backward", "kill")])
    for end in ends[1:]:
        assert end.error is not None
        assert "the process that holds the store" in end.error


def is_told(found):
    return isinstance(found, str) and "to which rank" in found and "is over for the others" in found


@pytest.mark.parametrize(("what", "others_find"), [("sum", [3.0, 3.0]), ("consolidate", None), ("equal", True)])
def test_a_rank_that_was_stopped_until_a_call_was_over_is_told_and_gets_no_other_calls_sum(what, others_find):
    ends = run_processes(4, missing_a_call, 2, 2.0, what, True)
    assert [end.error for end in ends] == [None] * 4
    for end in ends:
        first, found, last = end.value
        assert (first, last) == ([4.0, 0.0], [4.0, 8.0])
        assert is_told(found) if end.rank == 2 else found == others_find


def test_a_rank_that_was_busy_until_a_call_was_over_is_told_and_gets_no_other_calls_sum():
    """The others end it in an error, first some of them; or without that rank if it does not say soon that it comes.

    It is told so when the first has given the call up, and may come in time to do it with the other two.
    """
    ends = run_processes(4, missing_a_call, 2, 2.0, "sum", False)
    assert [end.error for end in ends] == [None] * 4
    with_it = [end.rank for end in ends if end.value[1] == [3.0, 3.0]]
    assert 2 not in with_it or len(with_it) == 3
    for end in ends:
        first, found, last = end.value
        assert (first, last) == ([4.0, 0.0], [4.0, 8.0])
        assert end.rank in with_it or is_told(found) or (end.rank != 2 and "no answer from" in found)


@pytest.mark.parametrize("is_hasty", [False, True], ids=["outside", "a member again"])
def test_a_rank_that_comes_back_amid_a_call_leaves_it_to_the_others_and_makes_the_next_one_with_them(is_hasty):
    ends = run_processes(4, partial(back_amid_a_call, is_hasty=is_hasty), 2, 2.0)
    assert [end.error for end in ends] == [None] * 4
    assert [end.value for end in ends] == [["left behind" if end.rank == 2 else None, None, True] for end in ends]


@pytest.mark.parametrize("is_hasty", [False, True], ids=["outside", "standing aside"])
@pytest.mark.parametrize("trains", [False, True], ids=["and does not train", "and trains"])
def test_a_rank_that_was_left_behind_is_called_back_when_another_dies_and_too_few_would_be_left(is_hasty, trains):
    body = partial(back_amid_a_call, is_hasty=is_hasty, dies=3, trains=trains)
    steps = [True] if trains else []
    for end in survivors(run_processes(4, body, 2, 2.0, limit_s=60), {3}):
        assert (end.error, end.value) == (None, ["left behind", *steps, None, *steps, True])


@pytest.mark.parametrize("algorithm", [commrt.BackupWorkers(1), commrt.Gossip()], ids=["backup workers", "gossip"])
def test_a_death_as_some_have_a_sum_already_makes_no_value_count_twice(algorithm):
    ends = survivors(run_processes(4, dying_in_a_sum, algorithm, 2), {2})
    assert [(end.error, end.value) for end in ends] == [(None, [3.0])] * 3


@pytest.mark.parametrize("is_in_step", [True, False], ids=["stopped in a step", "stopped in a part of the call"])
def test_who_comes_back_between_two_parts_of_a_call_takes_it_from_nobody(is_in_step):
    ends = run_processes(4, partial(back_between_parts, is_in_step=is_in_step), 2, 1.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    assert [end.value for end in ends] == [["left behind" if end.rank == 2 else None, None] for end in ends]


def test_a_rank_that_is_stopped_twice_in_a_part_of_a_call_ends_it_for_nobody_and_learns_that_it_missed_it():
    ends = run_processes(4, stopped_twice_in_a_part, 2.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    assert [end.value for end in ends] == [("left behind" if end.rank == 2 else True, True) for end in ends]


def test_a_rank_that_hears_nobody_tries_a_call_of_all_four_times_and_then_leaves_it_to_the_others():
    ends = run_processes(4, never_through, 2.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    assert [end.value for end in ends] == [(4 if end.rank == 1 else None, True) for end in ends]


def test_a_rank_that_makes_another_call_than_the_others_learns_it_at_once_and_they_go_on_when_it_ends():
    ends = run_processes(4, another_call, 4.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    said, waited_s = ends[1].value
    assert said.startswith("rank 1 comes to all_reduce() where rank ")
    assert said.endswith(" came to consolidate(): let all ranks make the same calls of all, in the same order")
    assert waited_s < 4
    assert [end.value[0] for end in survivors(ends, {1})] == [None] * 3


@pytest.mark.parametrize("trains", [False, True], ids=["at once", "after a step"])
def test_a_rank_that_has_made_another_call_than_the_others_makes_the_next_one_with_them(trains):
    ends = run_processes(3, another_call_and_on, 4.0, trains, limit_s=60)
    assert [end.error for end in ends] == [None] * 3
    firsts = ["DisagreementError" if end.rank == 1 else "LeftBehind" for end in ends]
    assert [end.value for end in ends] == [[first, True] for first in firsts]


def test_a_call_that_all_who_came_gave_up_is_over_for_one_that_comes_to_it_later():
    ends = run_processes(3, given_up_by_all, 1.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 3
    assert [end.value for end in ends] == [("DeadlineExceeded", None)] * 2 + [("LeftBehind", None)]


def test_a_death_as_all_refuse_a_sum_leaves_the_others_refusing_it_and_the_world_going_on():
    ends = survivors(run_processes(4, refused_as_one_dies, limit_s=60), {3})
    assert [(end.error, end.value) for end in ends] == [(None, ("DisagreementError", True))] * 3


def test_a_refusal_of_one_rank_alone_is_raised_there_at_once_and_the_others_learn_that_it_went_on():
    ends = run_processes(4, refused_by_one, 10.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    firsts = ["UsageError" if end.rank == 1 else "LeftBehind" for end in ends]
    assert [end.value for end in ends] == [[first, True] for first in firsts]


def test_a_late_rank_that_others_wait_for_does_not_ask_a_stopped_one_for_weights_until_their_deadline():
    ends = run_processes(4, late_beside_a_stopped_one, 2.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    assert [end.value for end in ends] == [(end.rank != 1, True) for end in ends]


@pytest.mark.parametrize("times", [1, 3], ids=["once", "three times"])
def test_connections_that_are_not_made_are_made_with_those_who_come_the_next_time(times):
    ends = survivors(run_processes(4, connecting_in_vain, 4.0, times, limit_s=60), {3})
    if times == 1:
        assert [(end.error, end.value) for end in ends] == [(None, True)] * 3
    else:
        assert "not all 3 ranks connected" in ends[1].error


@pytest.mark.parametrize("is_stopped_again", [False, True], ids=["for good", "and is stopped again"])
def test_who_comes_back_as_another_is_about_to_begin_ends_nothing(is_stopped_again):
    ends = run_processes(4, partial(slow_to_begin, is_stopped_again=is_stopped_again), 2.0, limit_s=60)
    assert [end.error for end in ends] == [None] * 4
    assert all(end.value < 1e-6 for end in survivors(ends, {2}))


@pytest.mark.parametrize("algorithm", [commrt.BackupWorkers(1), commrt.Gossip()], ids=["backup workers", "gossip"])
@pytest.mark.parametrize(
    "when", [(BoundProgram, "run"), (Survival, "_all_came_through")], ids=["it knows that", "all know how"]
)
def test_a_death_as_ranks_disagree_leaves_the_others_disagreeing_and_the_world_going_on(algorithm, when):
    for end in survivors(run_processes(4, dying_in_a_disagreement, algorithm, 2, when, limit_s=60), {2}):
        assert end.error is None
        said, equal, waited_s = end.value
        assert said.startswith("lunch: rank 1 disagrees with rank 0 about dish: 'number 1' against 'number 0'. Start")
        assert equal
        assert waited_s < 15  # half of the deadline
