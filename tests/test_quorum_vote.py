# SPDX-License-Identifier: Apache-2.0
"""The quorum protocol on a store: members that wait for a lost one end the attempt, and old steps leave no keys."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
from moved_clock import moved_clock
from store_members import LONG_S
from torch.distributed import FileStore

from commrt.backup_workers import quorum
from commrt.backup_workers.quorum import (
    DONE,
    FAILED,
    OLDEST_STEP,
    Announcement,
    QuorumVote,
    StepOutcome,
    quorum_key,
    set_and_wake,
)
from commrt.elastic.records import Arrival
from commrt.elastic.roster import arrival_key
from commrt.errors import QuorumLost
from commrt.runtime.generation import Loss
from commrt.threads.calls import start_call
from commrt.threads.deadline import Timeouts

PATIENT_S = 10.0
OUTCOME = quorum_key(0, 0, "outcome")
WRITTEN = ["announced", "outcome"]


class NoOtherAttempt(Exception):
    """A step has failed, and is not tried again."""


def never(generation):
    raise NoOtherAttempt


def vote_of(member, store=None, *, is_called=False, next_attempt=never):
    elastic = SimpleNamespace(member=member, require_open=int, is_called=is_called, ensure_generation=next_attempt)
    return QuorumVote(store or member.store.connection, elastic, lambda *_: True)


# a member that has the sum waits for the first member, who says when all have it


class Watched:
    """A store that says when somebody waits for the outcome of a step."""

    def __init__(self, store):
        self._store, self.waits = store, Event()

    def clone(self):
        return self

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        if key == OUTCOME:
            self.waits.set()
        return self._store.get(key)


def waiting_for_the_first(member, **options):
    """Return the future of what a step of rank 1 comes to in which rank 0 counts, and does not say it.

    The step waits for rank 0 by then: a clock that moves earlier would blame the store.
    """
    watched = Watched(store := member.store.connection)
    vote = vote_of(member, watched, **options)
    store.append(quorum_key(0, 0, "announced"), f"{Announcement(0, 0)} ")
    ended = start_call(lambda: vote.run(Announcement(1, 0), 0))
    assert watched.waits.wait(PATIENT_S), "the step does not wait for rank 0"
    return ended


def goes_on_without(found):
    found[1].generation = found[1].generation.successor([Loss(0, 0, "it was silent")], 0)


LOSSES = {
    "its process is gone": lambda found: found[0].processes.close(),
    "the others went on without it": goes_on_without,
    "the others form a new generation": None,
    "it is silent up to the deadline": None,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_member_that_waits_for_a_lost_one_ends_the_attempt(members, loss):
    found = members(2, 2)
    if (lose := LOSSES[loss]) is not None:
        lose(found)
    is_called = loss == "the others form a new generation"
    with moved_clock() if loss == "it is silent up to the deadline" else nullcontext() as clock:
        ended = waiting_for_the_first(found[1], is_called=is_called)
        if clock is not None:
            clock.advance_until(ended.done)
        with pytest.raises(NoOtherAttempt):
            ended.result(PATIENT_S)
    assert found[0].store.connection.get(OUTCOME).decode() == FAILED


@pytest.mark.parametrize("ranks", [(), (0, 1)], ids=["to be chosen", "to have the sum"])
def test_a_step_that_the_others_have_deleted_is_not_waited_for(members, ranks):
    member = members(2, 2)[1]
    vote = vote_of(member)
    member.store.connection.set(OLDEST_STEP, "1")
    assert not vote.wait_for(OUTCOME, 0, 0, ranks)


def test_a_member_waits_for_one_that_lives_up_to_the_deadline(members):
    found = members(2, 2)
    with moved_clock() as clock:
        end_s = clock.now_s() + 0.8 * LONG_S
        ended = waiting_for_the_first(found[1])
        clock.advance_until(lambda: clock.now_s() >= end_s)
        assert not ended.done()
        set_and_wake(found[0].store.connection, OUTCOME, DONE)
        assert ended.result(PATIENT_S).counts


def test_a_step_that_keeps_others_in_a_collective_waiting_ends_at_its_limit(members, monkeypatch):
    monkeypatch.setattr(quorum, "PROBE_MOST_S", 4.0)  # the limit is no multiple of a pause
    found = members(3, 2)  # rank 2 lives, and announces nothing
    found[1].roster.arrive(arrival_key(found[1].generation, 1), Arrival(0, "barrier"))
    vote = vote_of(found[0], next_attempt=lambda _: found[0].generation)
    with moved_clock() as clock:
        begin_s = clock.now_s()
        ended = start_call(lambda: vote.run(Announcement(0, 0), 0))
        clock.advance_until(ended.done, step_s=0.04)
        waited_s = clock.now_s() - begin_s
    assert ended.result() == StepOutcome(1, is_over=False)
    assert Timeouts.of(LONG_S).step_s < waited_s < Timeouts.of(LONG_S).step_s + 1.0


def test_a_member_that_dies_while_it_waits_alone_in_a_collective_is_missed(members):
    found = members(3, 3)
    found[2].roster.arrive(arrival_key(found[2].generation, 1), Arrival(0, "barrier"))
    found[2].processes.close()
    vote = vote_of(found[0], next_attempt=lambda _: found[0].generation)
    with moved_clock() as clock:
        ended = start_call(lambda: vote.run(Announcement(0, 0), 0))
        clock.advance_until(ended.done)
    with pytest.raises(QuorumLost, match="rank 2 is lost"):
        ended.result()


@pytest.fixture
def alone(members, monkeypatch):
    """The vote of one rank that is enough for a step, on a store that keeps few steps."""
    monkeypatch.setattr(quorum, "KEPT_STEPS", 4)
    monkeypatch.setattr(quorum, "DELETED_STEPS", 2)
    (member,) = members(1, 1)
    return vote_of(member, next_attempt=lambda _: member.generation)


def step(vote, number, failing=0):
    """Make a step in which so many attempts fail."""
    sums = iter([*[False] * failing, True])
    vote.reduce = lambda *_: next(sums)
    outcome = vote.run(Announcement(0, 0), number)
    if deletion := vote.delete_old_steps(number):
        deletion.result(PATIENT_S)
    return outcome


@pytest.mark.parametrize("failing", [0, 2])
def test_the_store_holds_no_more_keys_the_more_steps_there_are(alone, failing):
    counts = []
    for number in range(24):
        assert step(alone, number, failing).counts
        counts.append(alone._store.num_keys())
    assert len({*counts[9::2]}) == 1  # even steps delete


def test_a_rank_that_comes_to_a_deleted_step_is_told_at_once(alone):
    for number in range(16):
        step(alone, number)
    assert step(alone, 0) == StepOutcome(0)


@pytest.mark.timeout(20)  # or the disk fills
def test_old_steps_are_deleted_from_a_store_that_says_of_every_key_that_it_was_there(tmp_path):
    store = FileStore(str(tmp_path / "store"), 1)
    for attempt in range(2):
        store.set(quorum_key(0, attempt, "announced"), "")
        set_and_wake(store, quorum_key(0, attempt, "outcome"), FAILED)
    quorum._delete_steps(store, 1)  # ends, although each deletion is said to have found its key
    assert not any(store.check([quorum_key(0, attempt, what)]) for attempt in range(2) for what in WRITTEN)
