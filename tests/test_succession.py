# SPDX-License-Identifier: Apache-2.0
"""A process that takes the place of a dead one, while the others train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import commrt

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
