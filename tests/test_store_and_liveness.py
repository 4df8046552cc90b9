# SPDX-License-Identifier: Apache-2.0
"""A process counts as alive while its kernel answers for it, and a key of the store keeps its first value."""

from __future__ import annotations

import errno
import os
import signal
import socket
from datetime import timedelta
from threading import Event, Thread
from time import sleep

import failing_ranks
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commrt.backup_workers.quorum import set_once
from commrt.elastic.generations import Listener, probe
from commrt.store.client import typed
from commrt.testing.processes import run_processes

LIMIT_S = 20.0


def test_a_listener_answers_until_it_is_closed():
    listener = Listener("127.0.0.1")
    assert [probe(listener.address, LIMIT_S) for _ in range(3)] == [True] * 3
    listener.close()
    assert probe(listener.address, LIMIT_S) is False
    listener.close()


@pytest.mark.parametrize(
    "error", [TimeoutError(), OSError(errno.EMFILE, "too many open files"), UnicodeError("label empty")]
)
def test_only_a_refusal_says_that_a_process_is_gone(monkeypatch, error):
    def fail(*_):
        raise error

    assert probe("127.0.0.1 1", LIMIT_S) is False
    monkeypatch.setattr(socket, "create_connection", fail)
    assert probe("127.0.0.1 1", LIMIT_S) is None


def test_a_listener_answers_more_often_than_a_queue_is_long(monkeypatch):
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    listener = Listener("127.0.0.1")
    assert [probe(listener.address, LIMIT_S) for _ in range(20)] == [True] * 20
    listener.close()


@pytest.mark.processes
def test_a_stopped_process_answers_and_a_killed_one_does_not_even_if_its_child_lives():
    def on_message(_, message, process):
        address, child = message
        os.kill(process.pid, signal.SIGSTOP)
        before = probe(address, LIMIT_S) is False
        process.kill()
        process.join()
        found.append((before, probe(address, LIMIT_S) is False))
        os.kill(child, signal.SIGKILL)
        return True

    found = []
    run_processes(1, failing_ranks.listening, on_message=on_message)
    assert found == [(False, True)]


@pytest.mark.parametrize("dies", [False, True], ids=["", "the first process dies before it wakes the others"])
@pytest.mark.parametrize("use_libuv", [True, False, None], ids=["libuv", "older", "one process"])
def test_the_first_value_holds_and_every_waiting_rank_gets_it(use_libuv, dies):
    if use_libuv is None:
        store = waiting = HashStore()
    else:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        waiting = store.clone()
    heard, begun = [], Event()

    def listen():
        begun.set()
        waiting.wait(["shelf/word"], timedelta(seconds=LIMIT_S))
        heard.append(waiting.get("shelf/word"))

    listener = Thread(target=listen)
    listener.start()
    begun.wait()
    sleep(0.2)  # nobody says that it waits; too early, and this passes for no reason
    shelf = PrefixStore("shelf", store)
    if dies:
        shelf.compare_set("word", "", "first")
    assert [set_once(shelf, "word", word) for word in ("second" if dies else "first", "second")] == ["first", "first"]
    listener.join(LIMIT_S / 2)
    assert heard == [b"first"]


def test_a_record_reads_as_it_was_written():
    assert typed([1, "a", None, True], int, str, int | None, bool) == [1, "a", None, True]


@pytest.mark.parametrize(
    "other", [{0: "a"}, "ab", None, [1], [1, 2], ["a", "a"], [-1, "a"], [True, "a"], [1 << 63, "a"]]
)
def test_a_record_of_another_kind_is_refused(other):
    with pytest.raises(ValueError, match=r"not as expected|zip\(\)"):
        typed(other, int, str)
