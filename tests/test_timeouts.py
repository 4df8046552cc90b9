# SPDX-License-Identifier: Apache-2.0
"""All limits of waits follow from one number, and one that would invert their order is refused where it is given."""

from __future__ import annotations

import logging
from threading import Event
from types import SimpleNamespace

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import moved_clock

import commrt
from commrt.c10d.group import ProcessGroupWorld
from commrt.errors import DeadlineExceeded, UsageError
from commrt.runtime import init
from commrt.store import client
from commrt.store.client import call_store
from commrt.testing.ranks import local_worlds
from commrt.threads.deadline import DEFAULT_TIMEOUT_S, PARTS, Deadline, Timeouts
from commrt.threads.future import start_call
from commrt.tools.commands import machine


@given(st.floats(1e-6, 1.9e6))
def test_each_limit_is_below_the_next(timeout_s):
    probe_s, step_s, collective_s, start_s = Timeouts.of(timeout_s)
    assert probe_s < step_s < collective_s < start_s
    assert collective_s == timeout_s
    assert start_s >= DEFAULT_TIMEOUT_S


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
    monkeypatch.setattr(init, "_join_launch", lambda launch, start_s: local_worlds(2, start_s)[launch.rank])
    with caplog.at_level(logging.INFO, "commrt"), commrt.init(20, start_timeout_s=60) as world:
        assert (world.rank, world.timeout_s) == (rank, 20)
    assert [record.getMessage() for record in caplog.records] == logged


def test_the_doctor_shows_the_limits(monkeypatch):
    monkeypatch.setenv("COMMRT_TIMEOUT_S", "600")
    (found,) = machine._timeouts()
    assert found.detail.startswith("probe 2 s < step 300 s < collective 600 s <= start 1200 s")


# each place uses them


def test_a_request_to_the_store_ends_after_what_it_waits_for_could():
    never = Event()
    with moved_clock() as clock:
        begin_s, silent = clock.now_s(), start_call(lambda: call_store(never.wait, 5.0))
        clock.wait_for_readers(1)
        clock.advance_until(silent.done)
        with pytest.raises(DeadlineExceeded, match=f"within {5.0 + client.ANSWER_S:g} s"):
            silent.result()
        assert clock.now_s() - begin_s >= 5.0 + client.ANSWER_S
    never.set()
