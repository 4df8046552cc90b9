# SPDX-License-Identifier: Apache-2.0
"""While a process is stopped itself, nobody is late: not the store, and not those with whom it is to connect."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Timer

import pytest
from latecomers import stopped_in_a_question, stopped_while_it_asks
from torch.distributed import HashStore

from commrt.members import membership
from commrt.members.membership import Membership
from commrt.testing.processes import run_processes
from commrt.threads import patience
from commrt.threads.patience import Patience


def test_all_that_was_waited_counts_where_one_looks_often(monkeypatch):
    monkeypatch.setattr(patience, "monotonic", iter([0.0, 1.0, 2.5, 4.5, 8.0]).__next__)
    patient = Patience(8.0)
    assert [patient.waited_s for _ in range(3)] == [1.0, 2.5, 4.5]
    assert patient.left_s == 8.0 - 4.5 - 2.0


def test_a_stop_counts_as_a_quarter_of_the_limit(monkeypatch):
    monkeypatch.setattr(patience, "monotonic", iter([0.0, 1.0, 1000.0, 1001.0]).__next__)
    patient = Patience(8.0)
    assert [patient.left_s for _ in range(3)] == [7.0, 5.0, 4.0]


def test_what_may_take_long_between_two_looks_counts(monkeypatch):
    monkeypatch.setattr(patience, "monotonic", iter([0.0, 5.0, 1000.0]).__next__)
    patient = Patience(8.0, between_s=6.0)
    assert [patient.left_s for _ in range(2)] == [3.0, -3.0]


@pytest.mark.processes
def test_who_is_stopped_for_longer_than_the_limit_hears_an_answer_that_comes_soon_after():
    def stop(_, pid, process):
        os.kill(pid, signal.SIGSTOP)
        Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()

    (end,) = run_processes(1, stopped_while_it_asks, on_message=stop)
    assert (end.error, end.value) == (None, "an answer")


@pytest.mark.processes
def test_who_is_stopped_in_a_step_is_late_and_does_not_take_the_store_for_silent():
    def wake(_, pid, process):
        Timer(4.0, os.kill, (pid, signal.SIGCONT)).start()

    ends = run_processes(4, stopped_in_a_question, 2, 1.0, on_message=wake)
    assert [(end.error, end.value) for end in ends] == [(None, True)] * 4


def test_who_is_stopped_while_it_waits_for_the_others_goes_on_with_those_that_come_after_it_woke(monkeypatch):
    looked = Event()

    class Stopped(Patience):
        """Before the first look."""

        def __init__(self, limit_s):
            super().__init__(limit_s)
            self._looked_s -= 1000.0

        @property
        def waited_s(self):
            waited_s = super().waited_s
            looked.set()
            return waited_s

    monkeypatch.setattr(membership, "Patience", Stopped)
    store = HashStore()
    rooms = [Membership(store, rank, range(2), "127.0.0.1") for rank in range(2)]
    for room in rooms:
        room.enter()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rooms[0].assemble, 3, 20.0, int)
        looked.wait(20.0)
        second = pool.submit(rooms[1].assemble, 4, 20.0, int)
        assert (first.result(30.0), second.result(30.0)) == (4, 4)
    for room in rooms:
        room.leave("it ends")
