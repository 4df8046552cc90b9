# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, stops, differs or ends early: the others end in time, in an error that names it."""

from __future__ import annotations

import os
import re
import signal

import failing_ranks
import pytest

import commrt
from commrt.store.launcher import TRANSPORTS
from commrt.testing.processes import run_processes

TIMEOUT_S = 3.0
LIMIT_S = 80.0
"""Starting processes on a busy machine, the deadline, and what a failing rank takes to tell the others."""

pytestmark = pytest.mark.processes


def strike(size, victim, signal_number, algorithm, timeout_s=TIMEOUT_S):
    """Send `victim` a signal in mid-step; return how ranks ended. Ranks that run beyond LIMIT_S have no error."""
    struck = []

    def on_message(rank, message, process):
        if message == "mid-step":
            os.kill(process.pid, signal_number)
            struck.append(rank)
        return message == "mid-step"

    outcomes = run_processes(
        size, failing_ranks.struck_in_mid_step, algorithm, victim, timeout_s, limit_s=LIMIT_S, on_message=on_message
    )
    assert struck == [victim], [outcome.error for outcome in outcomes]
    return outcomes


def assert_names_the_place(error, victim):
    """Check that an error names rank, step, bucket and the victim, directly or through the rank that saw it first."""
    place = re.search(r"\[rank (\d+), peer (\d+), step (\d+), bucket (\d+), hop (\d+), nbytes (\d+)\]", error)
    assert place, error
    assert int(place[3]) == failing_ranks.STRIKE, error
    assert f"peer {victim}" in error, error


FIRST, *OTHERS = TRANSPORTS


@pytest.fixture(params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def transport(request, monkeypatch):
    """What the workers exchange through; elsewhere they choose, and take shared memory."""
    monkeypatch.setenv("COMMRT_TRANSPORT", request.param)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(
    ("transport", "algorithm", "victim"),
    [("shared", commrt.Torus2D(), 1), pytest.param("gloo", commrt.Ring(), 3, marks=pytest.mark.slow)],
    indirect=["transport"],
    ids=["shared-torus", "gloo-ring"],
)
def test_a_killed_worker_is_named_by_all_survivors_long_before_the_deadline(algorithm, victim):
    outcomes = strike(4, victim, signal.SIGKILL, algorithm, timeout_s=10 * LIMIT_S)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for survivor in (o for o in outcomes if o.rank != victim):
        assert survivor.error is not None
        assert_names_the_place(survivor.error, victim)
        assert survivor.exit_code == 1


def test_the_death_of_the_rank_that_holds_the_store_is_an_error_too():
    outcomes = strike(3, 0, signal.SIGKILL, commrt.Torus2D())
    for survivor in outcomes[1:]:
        assert survivor.error is not None
        assert survivor.error.startswith(("PeerLost", "DeadlineExceeded"))


@pytest.mark.usefixtures("transport")
def test_a_stopped_worker_ends_the_others_by_the_deadline():
    victim = 2
    outcomes = strike(4, victim, signal.SIGSTOP, commrt.Torus2D())
    assert outcomes[victim].exit_code is None
    for survivor in (o for o in outcomes if o.rank != victim):
        assert survivor.error is not None
        assert_names_the_place(survivor.error, victim)


@pytest.mark.slow
def test_a_stopped_store_holder_hangs_nobody():
    outcomes = strike(3, 0, signal.SIGSTOP, commrt.Ring())
    assert all(survivor.error for survivor in outcomes[1:])


@pytest.mark.parametrize("stays", [pytest.param(True, marks=pytest.mark.slow), False], ids=["and stays", "and leaves"])
def test_a_worker_that_runs_out_of_data_is_named(stays):
    early = 1
    outcomes = run_processes(
        3,
        failing_ranks.out_of_data,
        early,
        stays,
        TIMEOUT_S,
        limit_s=LIMIT_S,
        on_message=lambda *message: message[1] == "stays",
    )
    for other in (0, 2):
        error = outcomes[other].error
        assert error is not None
        assert_names_the_place(error, early)


def test_join_ends_normally_and_leaves_equal_replicas():
    outcomes = run_processes(3, failing_ranks.uneven_data_with_join, (9, 4, 6))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.value for outcome in outcomes] == [(True, 9)] * 3


@pytest.mark.parametrize(
    ("what", "field"), [pytest.param("layers", "buckets", marks=pytest.mark.slow), ("world size", "world size")]
)
def test_a_worker_that_differs_is_named_on_every_rank(what, field):
    outcomes = run_processes(3, failing_ranks.other_layout, 2, what, limit_s=LIMIT_S)
    for outcome in outcomes:
        assert outcome.error is not None
        assert re.match(rf"DisagreementError: .*rank 2 disagrees with rank 0 about {field}: ", outcome.error)


def test_ranks_that_never_come_are_named():
    outcomes = run_processes(3, failing_ranks.nobody_else, 1.5)
    assert outcomes[0].error is not None
    assert "ranks [1, 2] did not come within 1.5 s" in outcomes[0].error


def test_a_world_left_by_an_error_tells_the_others_at_once():
    outcomes = run_processes(
        2, failing_ranks.leaves_with_an_error, limit_s=LIMIT_S, on_message=lambda *message: message[1] == "stays"
    )
    assert outcomes[0].error is not None
    assert re.search(r"peer 1.* Rank 1 saw KeyError: ", outcomes[0].error)
