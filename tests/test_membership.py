# SPDX-License-Identifier: Apache-2.0
"""Who is left: one answer for all, whoever comes first, and nobody who lives is passed over in haste."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from commrt.errors import DeadlineExceeded, LeftBehind, PeerLost, Place, TransportClosed
from commrt.members import attendance
from commrt.members.attendance import Attendance, Loss, Need, Verdict
from commrt.members.membership import Membership

PATIENT_S = 20.0


def entered(ranks):
    store = HashStore()
    rooms = [Membership(store, rank, range(ranks), "127.0.0.1") for rank in range(ranks)]
    for room in rooms:
        room.enter()
    return rooms


def assembled(rooms, steps, timeout_s=PATIENT_S, require_open=int):
    """What each of `rooms` gets, all coming at once."""

    def come(room, step):
        try:
            return room.assemble(step, timeout_s, require_open)
        except (LeftBehind, TransportClosed) as error:
            return error

    with ThreadPoolExecutor(len(rooms)) as pool:
        return list(pool.map(come, rooms, steps))


def log(*lines):
    return Attendance.of(lines, 1)


def test_when_all_are_here_it_goes_on_from_the_latest_step():
    here = log(["here", 1, 0, 4], ["here", 1, 2, 6], ["here", 1, 1, 4])
    assert here.verdict(range(3), 0.0, PATIENT_S) == Verdict((0, 1, 2), 6, ())


def test_who_has_left_is_not_waited_for():
    here = log(["left", 0, 1, "it closed its world"], ["here", 1, 0, 4], ["here", 1, 2, 4])
    assert here.verdict(range(3), 0.0, PATIENT_S) == Verdict((0, 2), 4, (Loss(1, 4, "it closed its world"),))


def test_who_has_once_come_in_a_dead_ones_place_is_waited_for_the_next_time():
    lines = [["left", 1, 1, "gone", "0 old"], ["here", 2, 1, 5, "1 new"], ["here", 3, 0, 6, "0 x"]]
    assert Attendance.of(lines, 3, may_return=True).absent(range(2)) == [1]


@pytest.mark.parametrize(("bell", "left"), [("0 older", False), ("1 known", True), ("2 later", True), (None, True)])
def test_what_is_said_of_an_older_process_says_nothing_of_the_one_in_its_place(bell, left):
    lines = [["here", 1, 1, 4, "1 known"], ["left", 1, 1, "gone", bell]]
    assert (1 in Attendance.of(lines, 1, may_return=True).left) == left


def test_who_finished_in_good_order_is_told_from_who_was_lost_also_when_it_was_no_member():
    lines = [["left", 0, 1, "gone", "0 a"], ["left", 0, 3, "it closed its world", "0 b", True], ["here", 1, 0, 4]]
    verdict = Attendance.of(lines, 1, may_return=True).verdict(range(3), PATIENT_S, PATIENT_S)
    assert {loss.rank: loss.in_order for loss in verdict.lost} == {1: False, 2: False, 3: True}


@pytest.mark.parametrize(
    ("absent", "is_early", "promised", "is_short"),
    [
        pytest.param([], True, (), False, id="all are here"),
        pytest.param([2], True, (), False, id="one may still come"),
        pytest.param([2], False, (), True, id="one has been silent for long"),
        pytest.param([2], False, (2,), False, id="one has promised to come"),
        pytest.param([1, 2], False, (2,), True, id="one of two has promised to come"),
    ],
)
def test_ranks_outside_are_needed_where_too_few_of_the_members_will_come(absent, is_early, promised, is_short):
    lines = [["here", 1, rank, 4] for rank in range(3) if rank not in absent] + [["left", 1, 3, "gone"]]
    assert log(*lines).is_short(range(4), 3, promised, is_early=is_early) == is_short


@pytest.mark.parametrize(
    ("lines", "waits_s"),
    [
        pytest.param([], PATIENT_S, id="of whom nobody knows anything"),
        pytest.param([["missed", 1, 0, 2, "why"]], attendance.GRACE_S, id="that is missed and silent"),
        pytest.param([["missed", 1, 0, 2, "why"], ["missed", 1, 2, 0, "why"]], PATIENT_S, id="that will come"),
        pytest.param([["missed", 0, 0, 2, "why"]], PATIENT_S, id="that was missed before, and came"),
    ],
)
def test_a_rank_is_waited_for(lines, waits_s):
    here = log(*lines, ["here", 1, 0, 4], ["here", 1, 1, 4])
    assert here.verdict(range(3), waits_s - 0.1, PATIENT_S) is None
    assert here.verdict(range(3), waits_s + 0.1, PATIENT_S).members == (0, 1)


@given(st.data())
def test_everybody_gets_the_same_verdict(data):
    ranks = data.draw(st.integers(1, 6))
    gone = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    steps = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    rooms = entered(ranks)
    for rank in gone:
        rooms[rank].leave("it was drawn")
    stay = [room for rank, room in enumerate(rooms) if rank not in gone]
    begins = assembled(stay, [step for rank, step in enumerate(steps) if rank not in gone])
    assert set(begins) == {max(step for rank, step in enumerate(steps) if rank not in gone)}
    assert {room.members for room in stay} == {tuple(rank for rank in range(ranks) if rank not in gone)}
    assert {frozenset(loss.rank for loss in room.lost) for room in stay} == {frozenset(gone)}
    for room in stay:
        room.leave("the test is over")


def test_a_process_that_is_gone_is_found_long_before_the_deadline():
    rooms = entered(3)
    rooms[1]._doorbell.close()  # as its kernel would
    assert assembled(rooms[::2], [4, 4]) == [4, 4]
    (loss,) = rooms[0].lost
    assert (loss.rank, "its process is gone" in loss.why) == (1, True)


def test_a_rank_of_which_only_a_connection_broke_is_waited_for(monkeypatch):
    monkeypatch.setattr(attendance, "GRACE_S", 0.0)
    rooms = entered(3)
    rooms[0].miss(PeerLost("the connection broke", Place(0, 1)))
    late = threading.Timer(0.5, lambda: rooms[1].assemble(6, PATIENT_S, int))
    late.start()
    assert assembled(rooms[::2], [4, 4]) == [6, 6]
    assert not rooms[0].lost
    late.join()


def test_who_comes_after_the_verdict_is_told_that_the_others_went_on():
    rooms = entered(3)
    rooms[0].miss(DeadlineExceeded("no answer", Place(0, 1)))
    assert assembled(rooms[::2], [4, 4], timeout_s=0.2) == [4, 4]
    (error,) = assembled([rooms[1]], [4])
    assert isinstance(error, LeftBehind)
    assert "came too late: rank 0 saw DeadlineExceeded: no answer" in str(error)


def test_waiting_ends_when_the_world_does():
    def refuse():
        raise TransportClosed("the world was given up")

    (error,) = assembled(entered(2)[:1], [0], require_open=refuse)
    assert isinstance(error, TransportClosed)


def test_those_who_left_one_page_of_the_log_may_enter_the_next():
    rooms = entered(2)
    for room in rooms:
        room.leave("it detached its model")
        room.enter()
    assert assembled(rooms, [3, 3]) == [3, 3]
    assert not rooms[0].lost


def test_whoever_has_not_entered_the_next_page_is_not_taken_for_gone():
    rooms = entered(2)
    for room in rooms:
        room.leave("it detached its model")
    rooms[0].enter()
    assert not rooms[0].are_gone([1])
    rooms[1].enter()
    assert not rooms[0].are_gone([1])


def test_who_was_found_gone_and_is_there_after_all_learns_it():
    rooms = entered(2)
    rooms[0]._say("left", 1, 1, "rank 0 found that its process is gone")
    (error,) = assembled(rooms[1:], [4])
    assert isinstance(error, LeftBehind)


def test_one_that_is_silent_is_waited_for_where_those_who_finished_would_be_too_few_with_those_who_are_here():
    """Who goes on without it could make no step."""
    need = Need(2, 1.0, lambda *_: False, lambda: False)
    lines = [["here", 1, 0, 4], ["left", 1, 2, "closed", "0", True]]
    attendance = Attendance.of(lines, 1, may_return=True)
    assert attendance.verdict((0, 1, 2), 2.0, 10.0, need) is None
    assert attendance.verdict((0, 1, 2), 11.0, 10.0, need).members == (0,)
