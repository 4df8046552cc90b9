# SPDX-License-Identifier: Apache-2.0
"""All deadlines of a process read one clock, which a test may move, and count no time in which it was stopped."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Timer
from time import sleep

import pytest
import torch
from failing_collectives import stopped_in_a_question, stopped_while_it_asks
from moved_clock import moved_clock
from torch.distributed import HashStore
from transports import local, nccl, shared

from commrt.elastic.barrier import Barrier
from commrt.elastic.generations import Generation
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import DeadlineExceeded
from commrt.testing.processes import run_processes
from commrt.threads.deadline import Deadline, clock
from commrt.threads.future import Future
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

HOUR_S = 3600.0


@pytest.mark.parametrize("connect", [local, shared, nccl], ids=lambda connect: connect.__name__)
def test_a_transfer_that_nobody_answers_ends_when_the_clock_says_so(connect):
    first, second = connect(2, HOUR_S)
    with closing(first), closing(second), moved_clock() as moved, ThreadPoolExecutor(1) as pool:

        def receive():
            first.bind(P2PGroup((), (P2PMessage(1, torch.zeros(4)),), 0))(Tag(0, "it"))
            if hasattr(first, "wait"):
                first.wait()

        receiving = pool.submit(receive)
        moved.wait_for_readers(1)
        moved.advance(HOUR_S - 1.0)
        assert not receiving.done()
        moved.advance_until(receiving.done)
        with pytest.raises(DeadlineExceeded, match="within 3600 s"):
            receiving.result()


def test_a_future_is_waited_for_until_the_clock_says_so():
    with moved_clock() as moved, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Future().result, HOUR_S)
        moved.wait_for_readers(1)
        moved.advance(HOUR_S)
        with pytest.raises(TimeoutError, match="no result within 3600 s"):
            waiting.result()


LEFT = {
    "all waiting counts between frequent polls": ([1.0, 2.5, 4.5], 0.0, [7.0, 5.5, 3.5]),
    "a stop counts as a quarter of the limit": ([1.0, 1000.0, 1001.0], 0.0, [7.0, 5.0, 4.0]),
    "work that may take long between two polls counts": ([5.0, 1000.0], 6.0, [3.0, -3.0]),
}
"""When a deadline is polled, the time between two polls for which it allows, and what is left of 8 s then."""


@pytest.mark.parametrize(("polls_s", "between_s", "left_s"), LEFT.values(), ids=LEFT)
def test_a_deadline_counts_what_its_process_waited(monkeypatch, polls_s, between_s, left_s):
    monkeypatch.setattr(clock, "now_s", iter([0.0, *polls_s]).__next__)
    waits = Deadline(8.0, between_s)
    assert [waits.left_s for _ in polls_s] == left_s


@pytest.mark.processes
def test_a_process_that_is_stopped_beyond_its_limit_gets_an_answer_that_comes_soon_after():
    def stop(_, pid, process):
        os.kill(pid, signal.SIGSTOP)
        Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()

    (end,) = run_processes(1, stopped_while_it_asks, on_message=stop)
    assert (end.error, end.value) == (None, "an answer")


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_is_stopped_in_a_step_is_late_and_does_not_take_the_store_for_silent():
    def wake(_, pid, process):
        Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()

    ends = run_processes(4, stopped_in_a_question, 2, 3.0, on_message=wake)
    assert [(end.error, end.value) for end in ends] == [(None, True)] * 4


@pytest.mark.parametrize(
    "come",
    [
        pytest.param(lambda member: Barrier(member).arrive("lunch", 4, pytest.fail), id="a collective"),
        pytest.param(lambda member: member.roll_call(4, int), id="a roll call"),
    ],
)
def test_a_rank_that_was_stopped_waits_for_a_rank_that_comes_after_it_woke(come):
    store, founders = HashStore(), Generation(0, {0: 0, 1: 0})
    members = [StoreMembership(store, rank, founders, lambda: 20.0, host="127.0.0.1") for rank in range(2)]
    for member in members:
        member.join_first_generation()
    with moved_clock() as clock, ThreadPoolExecutor(2) as pool:
        first = pool.submit(come, members[0])
        clock.wait_for_readers(1)
        for _ in range(3):  # stops, of which one at least is between two polls of what is waited for
            sleep(0.05)
            clock.advance(1000.0)
        second = pool.submit(come, members[1])
        first.result()
        second.result()
    assert [member.current().ranks for member in members] == [(0, 1)] * 2
    for member in members:
        member.depart("it ends")
        member.close()
