# SPDX-License-Identifier: Apache-2.0
"""While a process is stopped itself, nobody is late: not the store, and not those with whom it is to connect."""

from __future__ import annotations

import os
import signal
from threading import Timer

import pytest
from latecomers import stopped_in_a_question, stopped_while_it_asks

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
