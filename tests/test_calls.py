# SPDX-License-Identifier: Apache-2.0
"""Which call of all ranks comes next, for ranks in turns on one store."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread

import pytest
from torch.distributed import HashStore

from commrt.errors import CommrtError, DeadlineExceeded, DisagreementError, LeftBehind
from commrt.members.calls import Calls


class Silent:
    """A store whose process is stopped."""

    def compare_set(self, *_):
        raise DeadlineExceeded("no answer")


class Asked:
    """A store that calls something before its n-th answer."""

    def __init__(self, store, left, then):
        self.store, self.left, self.then = store, left, then

    def compare_set(self, *words):
        self.left -= 1
        if self.left == 0:
            self.then()
        return self.store.compare_set(*words)


def ranks(count, timeout_s=0.2, are_gathered=True):
    store = HashStore()
    return [Calls(store, rank, lambda: timeout_s, lambda: are_gathered) for rank in range(count)]


def come(calls, what="a()"):
    with calls.coming(what):
        pass
    calls.enter()


def through(calls):
    come(calls)
    calls.require_next()
    calls.complete()
    calls.leave()


def test_ranks_that_make_the_same_calls_hear_nothing():
    for calls in (both := ranks(2)):
        come(calls)
    for _ in range(2):
        for calls in both:
            calls.require_next()
        for calls in both:
            calls.complete()
    for calls in both:
        calls.leave()
    assert [calls.mark for calls in both] == ["1.0", "1.0"]


def test_a_rank_that_comes_to_a_call_of_which_others_have_done_a_part_is_told_which():
    here, away = ranks(2)
    come(here)
    here.complete()
    with pytest.raises(LeftBehind, match=r"^save\(\), to which rank 1 comes now, is over for the others"):
        come(away, "save()")


def test_it_makes_the_next_call_with_them():
    here, away = ranks(2)
    through(here)
    with pytest.raises(LeftBehind):
        come(away)
    away.leave()
    for calls in (here, away):
        come(calls, "b()")
    assert (here.mark, away.mark) == ("1.0", "1.0")


def test_what_some_need_not_come_to_does_not_count_for_who_comes_too_late_either():
    here, away = ranks(2)
    through(here)
    with pytest.raises(LeftBehind), away.coming("run", counts=False):
        pass
    away.leave()
    assert away.mark == "0.0"


def test_who_ends_in_a_call_takes_it_from_nobody():
    left, other = ranks(2)
    come(left)
    left.leave()  # by Ctrl-C, say
    through(other)


@pytest.mark.parametrize("goes_on", [Calls.go_on, lambda calls: come(calls, "b()")], ids=["trains", "calls"])
def test_who_gives_a_call_up_and_goes_on_has_told_those_who_come_to_it_later(goes_on):
    left, other = ranks(2)
    come(left)
    left.leave()
    goes_on(left)
    with pytest.raises(LeftBehind):
        come(other)


@pytest.mark.parametrize("goes_on", [Calls.go_on, lambda calls: come(calls, "b()")], ids=["trains", "calls"])
def test_who_was_left_behind_does_not_end_the_call_that_the_others_are_in(goes_on):
    here, away = ranks(2)
    come(here)
    here.complete()
    with pytest.raises(LeftBehind):
        come(away)
    away.leave()
    Calls.go_on(away)
    here.require_next()


def test_who_was_left_behind_waits_at_the_next_call_until_the_others_are_out_of_theirs():
    here, away = ranks(2, timeout_s=5)
    come(here)
    here.complete()
    with pytest.raises(LeftBehind):
        come(away)
    away.leave()

    def go_on():
        here.require_next()  # nobody has ended it meanwhile
        here.leave()
        here.go_on()

    away._store = Asked(away._store, 3, go_on)
    come(away, "b()")
    come(here, "b()")
    assert away._store.left < 0


def test_it_does_not_wait_for_ever():
    here, away = ranks(2)
    come(here)
    here.complete()
    with pytest.raises(LeftBehind):
        come(away)
    away.leave()
    come(away, "b()")
    with pytest.raises(LeftBehind):
        here.require_next()


def test_a_call_to_which_a_rank_does_not_come_for_an_error_counts():
    (calls,) = ranks(1)
    with pytest.raises(KeyboardInterrupt), calls.coming("a()"):
        raise KeyboardInterrupt
    calls.leave()
    assert calls.mark == "1.0"


def test_a_call_that_all_refuse_when_they_have_come_counts_for_nobody():
    fast, slow = ranks(2)
    for _ in range(3):
        with fast.coming("a()"):
            pass
        fast.leave()
    come(fast, "b()")
    with slow.coming("a()"):
        pass
    slow.leave()
    come(slow, "b()")
    assert fast.mark == slow.mark == "0.0"


def test_a_late_rank_comes_to_a_call_that_all_refused_and_learns_only_then_that_it_missed_the_next_one():
    fast, slow = ranks(2)
    with fast.coming("refused()"):
        pass
    fast.leave()
    come(fast)
    fast.complete()
    with slow.coming("refused()"):
        pass
    slow.leave()
    with pytest.raises(LeftBehind, match=r"a\(\), to which"):
        come(slow)
    fast.leave()
    for calls in (slow, fast):
        calls._are_gathered = lambda: False
        come(calls, "b()")


def test_a_call_that_ends_because_the_store_is_silent_counts():
    (calls,) = ranks(1)
    calls._store = Silent()
    with pytest.raises(CommrtError):
        come(calls)
    calls.leave()
    assert calls.mark == "1.0"


def test_leaving_asks_nothing_of_the_store():
    (calls,) = ranks(1)
    come(calls)
    calls._store = Silent()
    calls.leave()
    assert calls.mark == "1.0"


def test_what_was_no_call_counts_for_nothing():
    (calls,) = ranks(1)
    calls.leave()
    assert calls.mark == "0.0"


def test_a_successor_does_next_what_the_others_do_next():
    here, new = ranks(2)
    through(here)
    through(here)
    here.go_on()
    new.follow()
    assert new.mark == here.mark == "2.0"


def test_a_successor_takes_a_call_that_the_others_refused_for_no_call_that_they_are_in():
    here, new = ranks(2)
    through(here)
    with here.coming("refused()"):
        pass
    here.leave()
    here.go_on()
    new.follow()
    come(new, "b()")
    come(here, "b()")


def test_a_successor_learns_the_name_of_the_next_call_like_the_others():
    here, new = ranks(2)
    through(here)
    here.go_on()
    new.follow()
    come(here, "b()")
    with pytest.raises(DisagreementError):
        come(new, "c()")


def test_who_missed_a_call_leaves_it_to_the_others_for_as_long_as_they_come_on_with_it():
    first, second = ranks(2)
    come(first)
    first.complete()
    with pytest.raises(LeftBehind):
        come(second)
    second.leave()
    next_one = Thread(target=come, args=(second, "b()"))
    next_one.start()
    for _ in range(3):
        next_one.join(0.4)  # two deadlines
        first.require_next()
        first.complete()
    assert next_one.is_alive()
    first.leave()
    come(first, "b()")
    next_one.join(10.0)
    assert (first.mark, second.mark) == ("1.0", "1.0")


def test_who_missed_a_call_waits_for_nobody_if_nobody_is_in_it_any_more():
    first, second = ranks(2, timeout_s=600, are_gathered=False)
    come(first)
    first.complete()
    with pytest.raises(LeftBehind):
        come(second)
    second.leave()
    come(second, "b()")
    assert first._exchange() == (1, 0)


@pytest.mark.parametrize("goes_on", [Calls.release, Calls.go_on], ids=["at once", "when it trains"])
@pytest.mark.parametrize("are_gathered", [False, True], ids=["all gave it up", "others are in it"])
def test_a_call_that_a_rank_gave_up_is_over_once_nobody_is_in_it_any_more(goes_on, are_gathered):
    first, late = ranks(2, are_gathered=are_gathered)
    come(first)
    first.give_up()
    first.leave()
    goes_on(first)
    with nullcontext() if are_gathered else pytest.raises(LeftBehind):
        come(late)


def test_who_was_left_behind_and_is_called_back_at_once_knows_already_that_the_call_is_over():
    first, second = ranks(2)
    come(first)
    first.complete()
    with pytest.raises(LeftBehind):
        come(second)
    second.overtake()  # before it leaves
    with pytest.raises(LeftBehind):
        first.require_next()
    second.leave()
    assert second.mark == "1.0"


def test_a_call_that_was_missed_is_missing_until_it_is_over():
    first, second = ranks(2)
    come(first)
    first.complete()
    with pytest.raises(LeftBehind):
        come(second)
    second.leave()
    assert second.is_missing_one
    first.leave()
    first.go_on()
    assert not second.is_missing_one


def test_who_comes_to_another_call_than_the_first_who_came_learns_whose():
    first, second, third = ranks(3)
    come(first, "consolidate()")
    come(second, "consolidate()")
    with pytest.raises(DisagreementError, match=r"rank 2 comes to all_reduce\(\) where rank 0 came to consolidate\(\)"):
        come(third, "all_reduce()")


def test_it_has_made_that_call_and_makes_the_next_one_with_the_others():
    first, other = ranks(2)
    come(first, "a()")
    with pytest.raises(DisagreementError):
        come(other, "b()")
    other.leave()
    come(other, "c()")
    with pytest.raises(LeftBehind):
        first.require_next()
    first.leave()
    come(first, "c()")


def test_what_a_question_is_about_is_compared_with_its_answers():
    first, second = ranks(2)
    come(first, "agree (lunch)")
    come(second, "agree (dinner)")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["who refused first", "who refused last"])
def test_the_name_of_a_call_that_all_refused_is_not_that_of_the_next_one(order):
    both = ranks(2)
    for calls in both:
        with calls.coming("a()"):
            pass
        calls.leave()
    for rank in order:
        come(both[rank], "b()")


def test_what_only_some_come_to_has_no_name():
    first, second = ranks(2)
    with first.coming("run", counts=False):
        pass
    first.leave()
    come(second, "a()")
    come(first, "a()")
