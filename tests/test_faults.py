# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, stops or differs: the others end in time, in an error that names it."""

import os
import re
import signal

import failing_ranks
import pytest

import commrt
from commrt.testing.processes import run_processes
from commrt.transport.names import TRANSPORTS

TIMEOUT_S = 6.0
LIMIT_S = 80.0
"""Starting processes on a busy machine, the deadline, and what a failing rank takes to tell the others."""

pytestmark = pytest.mark.processes


def strike(victim, signal_number, algorithm, timeout_s):
    """Send `victim`, one of four, a signal in mid-step; return its outcome and those of the others."""

    def on_message(rank, message, process):
        os.kill(process.pid, signal_number)
        return True

    body = failing_ranks.struck_in_mid_step
    outcomes = run_processes(4, body, algorithm, victim, timeout_s, limit_s=LIMIT_S, on_message=on_message)
    assert outcomes[victim].messages == ["mid-step"], [outcome.error for outcome in outcomes]
    return outcomes.pop(victim), outcomes


def require_place(error, victim):
    """Check that an error names rank, step, bucket and the victim, directly or through the rank that saw it first."""
    assert error is not None, "it still ran at the limit, or ended well"
    place = re.search(r"\[rank (\d+), peer (\d+), step (\d+), bucket (\d+), hop (\d+), nbytes (\d+)\]", error)
    assert place, error
    assert int(place[3]) == failing_ranks.STRIKE, error
    assert f"peer {victim}" in error, error


FIRST, *OTHERS = TRANSPORTS


@pytest.mark.parametrize(
    ("transport", "algorithm", "victim"),
    [("shared", commrt.Torus2D(), 1), pytest.param("gloo", commrt.Ring(), 3, marks=pytest.mark.slow)],
    ids=["shared-torus", "gloo-ring"],
)
def test_a_killed_worker_is_named_by_all_survivors_long_before_the_deadline(monkeypatch, transport, algorithm, victim):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    killed, survivors = strike(victim, signal.SIGKILL, algorithm, timeout_s=10 * LIMIT_S)
    assert killed.exit_code == -signal.SIGKILL
    for survivor in survivors:
        require_place(survivor.error, victim)
        assert survivor.exit_code == 1


@pytest.mark.parametrize("transport", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_stopped_worker_ends_the_others_by_the_deadline(monkeypatch, transport):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    stopped, others = strike(2, signal.SIGSTOP, commrt.Torus2D(), TIMEOUT_S)
    assert stopped.exit_code is None
    for other in others:
        require_place(other.error, 2)


def test_a_worker_of_another_world_size_is_named_on_every_rank():
    for outcome in run_processes(3, failing_ranks.one_starts_with_another_size, 2, limit_s=LIMIT_S):
        assert re.match("DisagreementError: .*rank 2 disagrees with rank 0 about world size: ", str(outcome.error))


def test_ranks_that_never_come_are_named():
    outcomes = run_processes(3, failing_ranks.only_the_first_comes, 1.5)
    assert "ranks [1, 2] did not come within 1.5 s" in str(outcomes[0].error)
