# SPDX-License-Identifier: Apache-2.0
"""A process that takes the place of a dead one, while the others train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from successors import trained

from commrt.testing.processes import AGAIN, run_processes

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from striking import Blow, reference_holds

AT = 4
pytestmark = pytest.mark.processes


def replaced(_, message, process):
    if message == "kill":
        process.kill()
        return AGAIN
    return None


@pytest.mark.parametrize("where", ["backward", "reducing"])
def test_another_process_takes_the_place_of_a_dead_one_and_counts(where):
    ends = run_processes(4, trained, [Blow(2, AT, where, "kill")], limit_s=60.0, on_message=replaced)
    assert [end.error for end in ends] == [None] * 4
    steps = max(max(end.value["used"]) for end in ends) + 1
    reference_holds(ends, needed=3, steps=steps)
    assert all(end.value["equal"] and not end.value["lost"] for end in ends)
    assert any(2 in members and step > AT for step, members in ends[2].value["used"].items())
