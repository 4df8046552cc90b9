# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, stops, differs or ends early: the others end in time, in an error that names it."""

from __future__ import annotations

import os
import re
import signal
from time import monotonic

import casualties
import pytest

import commrt
from commrt.testing.processes import run_processes

TIMEOUT_S = 3.0
SLACK_S = 5.0
"""Scheduling on a busy machine, and the two seconds a failing rank takes at most to tell the others."""

pytestmark = pytest.mark.processes


def strike(size, victim, blow, algorithm):
    """The outcomes, and how long after the blow the last survivor ended."""
    struck = []

    def on_message(rank, message, process):
        if message == "mid-step":
            os.kill(process.pid, blow)
            struck.append(monotonic())
        return message == "mid-step"

    body = casualties.struck_in_mid_step
    outcomes = run_processes(size, body, algorithm, victim, TIMEOUT_S, limit_s=40, on_message=on_message)
    assert struck, [outcome.error for outcome in outcomes]
    return outcomes


def assert_names_the_place(error, victim):
    """Rank, step, bucket and peer; the victim directly or through who saw it first."""
    place = re.search(r"\[rank (\d+), peer (\d+), step (\d+), bucket (\d+), hop (\d+), nbytes (\d+)\]", error)
    assert place, error
    assert int(place[3]) == casualties.STRIKE, error
    assert f"peer {victim}" in error, error


@pytest.mark.parametrize("algorithm", [commrt.Torus2D(), commrt.Ring()], ids=repr)
@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_worker_is_named_by_all_survivors_long_before_the_deadline(victim, algorithm):
    outcomes = strike(4, victim, signal.SIGKILL, algorithm)
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


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stopped_worker_ends_the_others_by_the_deadline(victim):
    outcomes = strike(4, victim, signal.SIGSTOP, commrt.Torus2D())
    assert outcomes[victim].exit_code is None
    for survivor in (o for o in outcomes if o.rank != victim):
        assert survivor.error is not None
        assert_names_the_place(survivor.error, victim)


def test_a_stopped_store_holder_hangs_nobody():
    outcomes = strike(3, 0, signal.SIGSTOP, commrt.Ring())
    assert all(survivor.error for survivor in outcomes[1:])


@pytest.mark.parametrize("stays", [True, False], ids=["and stays", "and leaves"])
def test_a_worker_that_runs_out_of_data_is_named(stays):
    early = 1
    outcomes = run_processes(3, casualties.out_of_data, early, stays, TIMEOUT_S, limit_s=15)
    for other in (0, 2):
        error = outcomes[other].error
        assert error is not None
        assert_names_the_place(error, early)


@pytest.mark.parametrize("steps", [(9, 4, 6, 9), (0, 3, 3, 1), (5, 5, 5, 5), (1, 2, 3, 4)], ids=str)
def test_join_ends_normally_and_leaves_equal_replicas(steps):
    outcomes = run_processes(4, casualties.uneven_data_with_join, steps)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.value for outcome in outcomes] == [(True, max(steps))] * 4


@pytest.mark.parametrize("what", ["layers", "algorithm", "wire", "bucket size", "world size"])
def test_a_worker_that_differs_is_named_on_every_rank(what):
    outcomes = run_processes(3, casualties.other_layout, 2, what, limit_s=30)
    field = {"layers": "buckets", "wire": "buckets", "bucket size": "buckets"}.get(what, what)
    for outcome in outcomes:
        assert outcome.error is not None
        assert re.match(rf"DisagreementError: .*rank 2 disagrees with rank 0 about {field}: ", outcome.error)
        assert outcome.seconds < 10


def test_ranks_that_never_come_are_named():
    outcomes = run_processes(3, casualties.nobody_else, 1.5)
    assert outcomes[0].error is not None
    assert "ranks [1, 2] did not come within 1.5 s" in outcomes[0].error
