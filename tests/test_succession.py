# SPDX-License-Identifier: Apache-2.0
"""A process that takes the place of a dead one, while the others train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import successions

import commrt
from commrt.testing.processes import RESTART, run_processes

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from churning import sail
from striking import Blow, reference_holds, struck

AT = 4
pytestmark = pytest.mark.processes


@pytest.mark.parametrize("where", ["backward", "reducing"])
def test_another_process_takes_the_place_of_a_dead_one_and_counts_with_the_weights_of_the_others(where):
    ends = struck(4, commrt.BackupWorkers(1), [Blow(2, AT, where, "replace")])
    assert [end.error for end in ends] == [None] * 4
    reference_holds(ends, needed=3)
    assert all(end.value["equal"] and not end.value["lost"] for end in ends)
    assert any(2 in members and step > AT for step, members in ends[2].value["used"].items())


def test_deaths_upon_deaths_of_two_at_once_and_a_successor_for_each_cost_no_step():
    voyage = sail(6, 2, deaths=5)
    assert voyage.deaths == 5


def test_the_process_that_holds_the_store_waits_for_those_who_still_train_however_long_they_do():
    ends = run_processes(3, successions.ends_early, 60)
    assert [end.error for end in ends] == [None] * 3
    assert all(end.value >= 50 for end in ends[1:])


def killed(_, message, process):
    process.kill()
    return RESTART if message == "replace" else True


@pytest.mark.parametrize("dies_at", [9, 11])
def test_a_death_at_the_end_of_an_epoch_to_which_ranks_come_from_different_steps_holds_nobody_up(dies_at):
    ends = run_processes(4, successions.epochs, dies_at, on_message=killed)
    assert [end.value for end in ends if end.rank != 2] == [(0, 1, 3)] * 3, [end.error for end in ends]


def test_a_successor_makes_the_calls_that_come_after_the_step_that_it_begins_with():
    ends = run_processes(4, successions.calls_at, (10, 12, 40), on_message=killed)
    assert [end.error for end in ends] == [None] * 4
    assert all(equal for end in ends for _, equal in end.value)
    assert [end.value[-1][0] for end in ends] == [40] * 4
