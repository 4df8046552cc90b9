# SPDX-License-Identifier: Apache-2.0
"""A process is there as long as its kernel answers for it, and not a moment longer."""

from __future__ import annotations

import errno
import os
import signal
import socket

import casualties
import pytest

from commrt.membership.liveness import LivenessListener, is_gone
from commrt.testing.processes import run_processes


def test_it_answers_until_it_is_closed():
    bell = LivenessListener("127.0.0.1")
    assert [is_gone(bell.address) for _ in range(3)] == [False] * 3
    bell.close()
    assert is_gone(bell.address)
    bell.close()


def test_it_listens_where_the_others_are_and_nowhere_else():
    bell = LivenessListener("localhost")
    assert bell.address.startswith(("127.", "::1"))
    bell.close()


@pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.EMFILE, "too many open files"), OSError(113, "")])
def test_only_a_refusal_says_that_a_process_is_gone(monkeypatch, error):
    def fail(*_):
        raise error

    assert is_gone("127.0.0.1 1")
    monkeypatch.setattr(socket, "create_connection", fail)
    assert not is_gone("127.0.0.1 1")


def test_it_answers_more_often_than_a_queue_is_long(monkeypatch):
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    bell = LivenessListener("127.0.0.1")
    assert [is_gone(bell.address) for _ in range(20)] == [False] * 20
    bell.close()


@pytest.mark.processes
def test_who_is_stopped_answers_and_who_is_killed_does_not_though_its_child_lives():
    def on_message(_, message, process):
        address, child = message
        os.kill(process.pid, signal.SIGSTOP)
        before = is_gone(address)
        process.kill()
        process.join()
        found.append((before, is_gone(address)))
        os.kill(child, signal.SIGKILL)
        return True

    found = []
    run_processes(1, casualties.ringing, on_message=on_message)
    assert found == [(False, True)]
