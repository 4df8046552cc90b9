# SPDX-License-Identifier: Apache-2.0
"""All limits of waits follow from one number and one clock, and count no time in which the process was stopped."""

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from cases import for_each
from failing_collectives import stopped_in_a_question, stopped_while_it_asks
from moved_clock import moved_clock
from transports import local, nccl, shared

import commrt
from commrt.c10d.group import ProcessGroupWorld
from commrt.errors import DeadlineExceeded, UsageError
from commrt.runtime import init
from commrt.testing.processes import run_processes
from commrt.testing.ranks import local_worlds
from commrt.threads.deadline import PARTS, Deadline, Timeouts, clock
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
        Timer(5.5, os.kill, (pid, signal.SIGCONT)).start()

    (end,) = run_processes(1, stopped_while_it_asks, on_message=stop)
    assert (end.error, end.value) == (None, "an answer")


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_is_stopped_in_a_step_is_late_and_does_not_take_the_store_for_silent():
    def wake(_, pid, process):
        Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()

    ends = run_processes(4, stopped_in_a_question, 2, 3.0, on_message=wake)
    assert [(end.error, end.value) for end in ends] == [(None, True)] * 4


@for_each(
    ("timeout_s", "start_timeout_s", "expected"),
    [
        (300.0, None, (2.0, 150.0, 300.0, 600.0)),
        (4.0, None, (1.0, 2.0, 4.0, 300.0)),
        (1800.0, None, (2.0, 900.0, 1800.0, 3600.0)),
        (1.5e6, None, (2.0, 7.5e5, 1.5e6, 2e6)),
        (20.0, 60.0, (2.0, 10.0, 20.0, 60.0)),
        (20.0, 20.0, (2.0, 10.0, 20.0, 20.0)),
    ],
)
def test_all_limits_follow_from_one_number(timeout_s, start_timeout_s, expected):
    assert Timeouts.of(timeout_s, start_timeout_s) == expected


def test_a_probe_takes_no_more_than_what_a_deadline_counts_between_two_polls():
    """Otherwise a wait that probes a silent host would last longer than its limit."""
    assert all(Timeouts.of(limit_s).probe_s <= Deadline(limit_s).poll_s for limit_s in (0.5, 4.0, 8.0, 300.0))
    assert Timeouts.of(4.0).probe_s == 4.0 / PARTS


def test_a_start_that_may_take_less_than_a_collective_is_refused(monkeypatch):
    with pytest.raises(UsageError, match=r"^start_timeout_s=60 is below timeout_s=300: .* raise the first"):
        commrt.init(start_timeout_s=60)
    monkeypatch.setenv("COMMRT_TIMEOUT_S", "600")
    with pytest.raises(UsageError, match=r"^start_timeout_s=300 is below timeout_s=600: .*COMMRT_TIMEOUT_S"):
        commrt.init(start_timeout_s=300)


@for_each("seconds", [0, -3, 3e6])
def test_a_group_of_torch_refuses_a_timeout_that_no_wait_can_have(seconds):
    with pytest.raises(UsageError, match=r"^timeout=.* is no deadline"):
        ProcessGroupWorld.set_timeout(SimpleNamespace(), seconds)


LIMITS = "commrt: timeouts: probe 2 s < step 10 s < collective 20 s <= start 60 s"


@pytest.mark.parametrize(("rank", "logged"), [(0, [LIMITS]), (1, [])])
def test_rank_0_alone_logs_the_limits_at_the_start(rank, logged, monkeypatch, caplog):
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(init, "_join_launch", lambda launch, start_s, _: local_worlds(2, start_s)[launch.rank])
    with caplog.at_level(logging.INFO, "commrt"), commrt.init(20, start_timeout_s=60) as world:
        assert (world.rank, world.timeout_s) == (rank, 20)
    assert [record.getMessage() for record in caplog.records] == logged
