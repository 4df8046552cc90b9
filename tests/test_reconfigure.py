# SPDX-License-Identifier: Apache-2.0
"""``init_process_group("commrt", enable_reconfigure=True)``: ranks come and go in a group of torch.distributed."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from reconfigured_ranks import changing, in_flight, refused

from commrt.testing.processes import run_processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 or later has it: make newest"),
]


def values(outcomes, lost=()):
    """What each process returns; None for those that are `lost`."""
    assert [outcome.error for outcome in outcomes if outcome.rank not in lost] == [None] * (len(outcomes) - len(lost))
    return [outcome.value for outcome in outcomes]


def test_a_group_goes_on_without_a_process_that_died_and_with_one_that_came_late():
    zero, one, _, three = values(run_processes(4, changing), lost={2})
    assert "this group has no ranks yet" in zero[0]
    assert "[rank 0, peer 2" in zero[2]
    assert zero[1:2] + zero[3:] == [(0, 3, 3.0), True, (1, 2, 1.0), 1.0, (1, 3, 4.0), [3.0] * 3, 4.0]
    assert one[1:2] + one[3:] == [(1, 3, 3.0), True, (0, 2, 1.0), 1.0, (2, 3, 4.0), [0.0] * 3, 4.0]
    assert three[1:] == [(0, 3, 4.0), [1.0] * 3, 4.0]


def test_works_in_flight_name_the_process_that_died_and_the_one_that_left():
    zero, one, _ = values(run_processes(3, in_flight), lost={2})
    for rank, seen in enumerate((zero, one)):
        assert [f"[rank {rank}, peer 2" in each or "Rank 2" in each for each in seen[:2]] == [True] * 2, seen
        assert seen[3] == 1.0
    reason = "the process group is reconfigured, without the ranks [1]"
    assert reason in zero[2]  # whether it had begun or not
    assert "[rank 1, peer 0" in one[2]
    assert f"Rank 0 saw TransportClosed: {reason}" in one[2]


def test_what_is_no_group_is_refused_and_a_later_one_works():
    for seen in values(run_processes(2, refused)):
        stranger, twice, used, alone, never, aborted, both = seen
        assert "are not each process once" in stranger
        assert "are not each process once" in twice
        assert "was already used" in used
        assert "ranks" in never
        assert "this group has no ranks yet" in aborted
        assert (alone in {0.0, 1.0}, both) == (True, 1.0)
