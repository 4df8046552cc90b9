# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves its world by an error leaves at once, and the others learn why."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic

import meetings
import pytest
import torch

import commrt
from commrt.algorithms import ring
from commrt.errors import PeerLost, TransportClosed, UsageError
from commrt.lane import Lane
from commrt.testing.processes import free_port, run_processes
from commrt.testing.ranks import local_worlds

PATIENT_S = 30.0
LIMIT_S = 80.0


def test_an_error_of_ones_own_ends_the_wait_of_the_others_and_is_told():
    first, second = local_worlds(2, timeout_s=PATIENT_S)

    def fail():
        with first:
            raise OSError("the data set is gone")

    begin = monotonic()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.run, ring.all_reduce(2), torch.ones(2))
        with pytest.raises(OSError, match="the data set is gone"):
            fail()
        error = waiting.exception()
    assert isinstance(error, PeerLost)
    assert "Rank 0 saw OSError: the data set is gone" in str(error)
    assert monotonic() - begin < PATIENT_S / 2


def test_leaving_by_an_error_does_not_wait_for_a_transfer_that_cannot_end():
    world, _ = local_worlds(2, timeout_s=PATIENT_S)
    begin = monotonic()
    running = world.lane.submit(lambda: world.run_now(ring.all_reduce(2), torch.ones(2), meetings.NOW))
    with pytest.raises(KeyboardInterrupt), world:
        raise KeyboardInterrupt
    assert isinstance(running.error(), TransportClosed)
    assert world.closed
    assert monotonic() - begin < PATIENT_S / 2


def test_a_world_that_closes_finishes_what_was_submitted():
    worlds = local_worlds(2, timeout_s=PATIENT_S)
    buffers = [torch.ones(2) for _ in worlds]
    go_on = Event()
    for world, buffer in zip(worlds, buffers, strict=True):
        world.lane.submit(go_on.wait)
        for _ in range(3):
            world.lane.submit(lambda w=world, b=buffer: w.run_now(ring.all_reduce(2), b, meetings.NOW))
    with ThreadPoolExecutor(2) as pool:
        closing = [pool.submit(world.close) for world in worlds]
        go_on.set()
    assert [future.exception() for future in closing] == [None, None]
    assert [buffer.tolist() for buffer in buffers] == [[8.0, 8.0]] * 2


def test_who_gave_up_cannot_go_on():
    world, _ = local_worlds(2)
    world.abort(UsageError("no"))
    world.abort(UsageError("no"))
    with pytest.raises(TransportClosed):
        world.run(ring.all_reduce(2), torch.ones(2))


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_ends_a_worker_in_the_middle_of_a_transfer_and_the_others_with_it(victim):
    absent, other = 2, 1 - victim

    def interrupt(rank, message, process):
        if message == "interrupt me":
            os.kill(process.pid, signal.SIGINT)
        return message == "absent"

    outcomes = run_processes(
        3, meetings.interrupted_in_a_transfer, victim, absent, limit_s=LIMIT_S, on_message=interrupt
    )
    assert outcomes[victim].exit_code == 1  # Python's for an interrupt; None if it had to be killed
    assert outcomes[other].error is not None
    assert outcomes[other].error.startswith("PeerLost")
    assert f"peer {victim}, step" in outcomes[other].error


INHERITED = "TransportClosed: this world belongs to the process that opened it"
REFUSALS = {
    "run": INHERITED,
    "agree": INHERITED,
    "submit": INHERITED,
    "pending": INHERITED,
    "current": "UsageError: there is no world yet",
    "init": "UsageError: this process was forked from a rank of the same job",
    "close": "done",
    "abort": "done",
    "transport": "done",
    "exit": "done",
}


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_forked_child_is_refused_and_harms_nobody(monkeypatch, transport):
    monkeypatch.setenv("COMMRT_TRANSPORT", transport)
    outcomes = run_processes(2, meetings.child_uses_the_world, limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for answers, buffer, reported in [outcome.value for outcome in outcomes]:
        assert {use: answer[: len(REFUSALS[use])] for use, answer in answers.items()} == REFUSALS
        assert buffer == [4.0] * 4
        assert not reported


@pytest.mark.processes
@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_forked_child_may_open_a_world_of_its_own(elsewhere):
    port = free_port() if elsewhere else None
    outcomes = run_processes(2, meetings.child_opens_a_world_of_its_own, port, limit_s=LIMIT_S)
    expected = [2, [2.0] * 4] if elsewhere else [1, [1.0] * 4]
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, expected)] * 2


@pytest.mark.processes
def test_a_forked_child_is_no_rank_of_its_parents_group():
    outcomes = run_processes(2, meetings.child_of_a_running_group, limit_s=LIMIT_S)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert all(outcome.value.startswith(REFUSALS["init"]) for outcome in outcomes)


@pytest.mark.processes
def test_a_forked_child_that_frees_gloo_s_sockets_ends_and_leaves_them_to_its_parent():
    (outcome,) = run_processes(1, meetings.child_frees_a_gloo_transport, limit_s=LIMIT_S)
    assert (outcome.error, outcome.value) == (None, (True, [2.0] * 4))


def test_a_lane_answers_even_if_its_failure_cannot_be_told():
    def tell(failure):
        raise OSError("no store")

    lane = Lane(tell)
    first, second = lane.submit(lambda: 1 // 0), lane.submit(int)
    error = first.error(PATIENT_S)
    assert isinstance(error, ZeroDivisionError)
    assert error.__notes__ == ["telling the other ranks failed as well: OSError: no store"]
    assert isinstance(second.error(PATIENT_S), TransportClosed)
    lane.close()


def test_a_second_init_applies_its_deadline():
    with commrt.init(100) as world:
        assert commrt.init(3) is world
        assert world.timeout_s == 3
        assert commrt.init().timeout_s == 3
        for wrong in ({"timeout_s": 0}, {"timeout_s": float("nan")}, {"start_timeout_s": -1}):
            with pytest.raises(UsageError, match="is no deadline"):
                commrt.init(**wrong)
        assert world.timeout_s == 3
