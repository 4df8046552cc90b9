# SPDX-License-Identifier: Apache-2.0
"""Generations: all ranks agree on one, late ranks are evicted, and a live rank is not evicted before the deadline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from threading import Event
from time import monotonic
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import moved_clock
from torch.distributed import HashStore

from commrt.elastic.barrier import Barrier
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.generations import GATHERING, OPEN, RUNNING, Generation, Head, arrival_key, joining_key
from commrt.elastic.store_membership import StoreMembership
from commrt.errors import CommrtError, DeadlineExceeded, DisagreementError, Evicted, TransportClosed, UsageError
from commrt.runtime.membership import Loss
from commrt.threads.deadline import Deadline

LONG_S = 20.0


def members(ranks, timeout_s=LONG_S, needed=0, store=None):
    store = HashStore() if store is None else store
    founders = Generation(0, dict.fromkeys(range(ranks), 0))
    found = [
        StoreMembership(store, rank, founders, lambda: timeout_s, host="127.0.0.1", needed=needed)
        for rank in range(ranks)
    ]
    for member in found:
        member.join_first_generation()
        member.calls = Barrier(member)
    return found


def at_once(calls):
    """What each call returns or raises, all made at once."""

    def result(call):
        try:
            return call()
        except CommrtError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls))


def until_the_deadline(calls):
    """As `at_once`; time passes once all of them wait."""
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        results = pool.submit(at_once, calls)
        clock.wait_for_readers(len(calls))
        clock.advance_until(results.done)
        return results.result()


def roll_calls(found, steps):
    return [lambda m=m, step=step: m.roll_call(step, int) for m, step in zip(found, steps, strict=True)]


def roll_call(found, steps):
    return at_once(roll_calls(found, steps))


def arriving(member, what="save()"):
    """As a rank does: after a change of the generation it goes on in the new one."""
    return lambda: member.calls.arrive(what, 0, lambda: member.adopt(member.current())).ranks


def end(found):
    for member in found:
        member.depart("the test is over")
        member.close()


# generations


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1),
    st.integers(0, 9),
    st.text(),
    st.booleans(),
    st.sampled_from([OPEN, GATHERING, RUNNING]),
)
def test_a_head_reads_as_it_was_written(incarnations, step, why, finished, phase):
    ranks = dict(sorted(incarnations.items()))
    losses = Loss(11, step, why, finished, 3), Loss(12, step, why)
    head = Head(Generation(step, ranks, step, losses, tuple(ranks)[1:], step), step, phase)
    assert Head.from_json(head.to_json().encode()) == head
    assert Head.from_json(head.to_json().encode()).to_json() == head.to_json()


def test_the_first_proposal_for_a_generation_holds_for_all_ranks():
    found = members(3)
    head, founders = found[0].head(), found[0].generation
    lost = [Loss(2, 4, "silent", by=0)], [Loss(0, 4, "silent", by=2)]
    nexts = [founders.successor(each, 4) for each in lost]
    assert [each.change(head, generation=after) for each, after in zip(found[::2], nexts, strict=True)] == [True, False]
    assert {each.latest().generation.ranks for each in found} == {(0, 1)}
    end(found)


# roll calls


@given(st.data())
def test_ranks_that_answer_a_roll_call_form_one_generation_from_the_latest_step(data):
    ranks = data.draw(st.integers(1, 6))
    gone = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    steps = data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
    found = members(ranks)
    for rank in gone:
        found[rank].depart("it was drawn")
    stay = [rank for rank in range(ranks) if rank not in gone]
    if not gone:
        found[0].depart("somebody must be lost, or there is no next generation")
        gone, stay = {0}, stay[1:]
    if stay:
        (generation,) = set(map(str, roll_call([found[rank] for rank in stay], [steps[rank] for rank in stay])))
        agreed = found[stay[0]].current()
        assert str(agreed) == generation
        assert (agreed.number, agreed.ranks, agreed.start) == (1, tuple(stay), max(steps[rank] for rank in stay))
        assert {loss.rank for loss in agreed.lost} == gone
    end(found)


def test_a_roll_call_that_all_answer_keeps_all_in_a_new_generation():
    found = members(3)
    assert {generation.ranks for generation in roll_call(found, [4, 4, 5])} == {(0, 1, 2)}
    end(found)


def test_a_process_that_is_gone_is_found_long_before_the_deadline():
    found = members(3)
    found[1].processes.close()  # as its kernel would
    first, _ = roll_call(found[::2], [4, 4])
    assert [(loss.rank, loss.why) for loss in first.lost] == [(1, "its process is gone")]
    end(found)


def test_a_member_that_lives_is_waited_for_up_to_the_deadline():
    found = members(3)
    with moved_clock() as clock, ThreadPoolExecutor(1) as pool:
        others = pool.submit(roll_call, found[::2], [4, 4])
        clock.wait_for_readers(2)
        end_s = clock.now_s() + LONG_S - 2.0
        clock.advance_until(lambda: clock.now_s() >= end_s)
        found[1].roll_call(6, int)
        assert {(each.ranks, each.start) for each in others.result(LONG_S)} == {((0, 1, 2), 6)}
    end(found)


def test_a_member_that_does_not_answer_in_time_is_evicted_and_told_by_whom():
    found = members(2)
    (generation,) = until_the_deadline(roll_calls(found[:1], [4]))
    assert generation.ranks == (0,)
    with pytest.raises(Evicted, match=r"generation 1 goes on without it: .*roll call.*noticed by rank 0") as raised:
        found[1].roll_call(4, int)
    assert (raised.value.generation, raised.value.by) == (1, 0)
    end(found)


def test_an_evicted_process_cannot_come_back_by_itself():
    found = members(2)
    until_the_deadline(roll_calls(found[:1], [4]))
    for call in (found[1].current, lambda: found[1].calls.arrive("save()", 4, int)):
        with pytest.raises(Evicted):
            call()
    assert found[0].current().ranks == (0,)
    end(found)


def test_with_backup_workers_a_roll_call_leaves_a_silent_member_without_connections():
    found = members(4, needed=3)
    begin_s = monotonic()
    generations = roll_call(found[:3], [4, 4, 4])
    assert monotonic() - begin_s < LONG_S / 4
    assert {(each.ranks, each.connected, each.lost) for each in generations} == {((0, 1, 2, 3), (0, 1, 2), ())}
    end(found)


def test_a_member_that_was_silent_has_connections_again_after_its_own_roll_call():
    found = members(4, needed=3)
    for member, generation in zip(found, roll_call(found[:3], [4, 4, 4]), strict=False):
        member.adopt(generation)
    found[3].adopt(found[3].current())
    assert {each.connected for each in roll_call(found, [4, 4, 4, 4])} == {(0, 1, 2, 3)}
    end(found)


def test_a_roll_call_of_backup_workers_waits_while_too_few_have_answered():
    found = members(3, needed=2)
    (error,) = until_the_deadline(roll_calls(found[:1], [4]))
    assert isinstance(error, DeadlineExceeded)
    assert "ranks [1, 2] are missing" in str(error)
    end(found)


def test_a_roll_call_in_a_collective_evicts_a_silent_member_at_the_deadline():
    found = members(4, needed=3)
    at_once([arriving(member) for member in found])
    generations = until_the_deadline(roll_calls(found[:3], [4, 4, 4]))
    assert {(each.ranks, each.silent) for each in generations} == {((0, 1, 2), ())}
    end(found)


def test_ranks_that_answer_late_do_not_leave_out_each_other_for_ever():
    found = answering(members(5), needed=3, late_s={3: 0.3, 4: 0.6}.items())
    found[0].adopt(found[0].roll_call(0, int))
    waited = Deadline(LONG_S)
    while (now := found[0].current()).silent or now.number < 2:
        assert waited.left_s > 0
        Event().wait(0.05)
    assert now.number < 9
    end(found)


def test_a_member_that_stays_silent_does_not_make_later_roll_calls_longer():
    generation = Generation(0, dict.fromkeys(range(4), 0))
    for _ in range(3):
        generation = generation.successor([], 0, silent=[3])
    assert generation.haste == 0
    assert generation.successor([], 0, silent=[2, 3]).successor([], 0, silent=[1, 2]).haste == 2


def test_no_collective_begins_while_a_member_has_no_connections():
    found = members(3, needed=2)
    for member, generation in zip(found, roll_call(found[:2], [4, 4]), strict=False):
        member.adopt(generation)
    found[2].adopt(found[2].current())
    with ThreadPoolExecutor(3) as pool:
        begun = [
            pool.submit(member.calls.arrive, "sum()", 4, lambda m=member: m.adopt(m.current())) for member in found
        ]
        while len(found[0].arrivals(arrival_key(found[0].generation, 1))) < 3:
            Event().wait(0.01)
        roll_call(found, [4, 4, 4])
        assert {each.result(LONG_S).silent for each in begun} == {()}
    end(found)


def test_a_collective_waits_for_a_member_that_was_silent_in_a_roll_call():
    found = members(3, needed=2)
    for member, generation in zip(found, roll_call(found[:2], [4, 4]), strict=False):
        member.adopt(generation)
    assert until_the_deadline([arriving(member) for member in found[:2]]) == [(0, 1)] * 2
    with pytest.raises(Evicted, match=r"did not come to save\(\) within"):
        found[2].current()
    end(found)


def test_waiting_ends_when_the_world_does():
    def refuse():
        raise TransportClosed("the world was given up")

    found = members(2)
    with pytest.raises(TransportClosed):
        found[0].roll_call(0, refuse)
    end(found)


@pytest.mark.parametrize(("rank", "longest_s"), [(0, 0.05), (1, 0.1), (9, 0.5), (19, 1.0), (29, 1.0)])
def test_the_k_th_rank_reads_the_store_up_to_k_times_less_often_but_once_a_second(rank, longest_s):
    member = StoreMembership(HashStore(), rank, Generation(0, dict.fromkeys(range(30), 0)), lambda: LONG_S)
    pauses = list(islice(member.pauses(Deadline(LONG_S)), 12))
    assert pauses[0] < 0.01
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(longest_s)


def test_a_process_that_is_no_member_yet_reads_the_store_as_often_as_the_first_rank():
    new = StoreMembership(HashStore(), 3, Generation(0, dict.fromkeys(range(3), 0)), lambda: LONG_S)
    first = StoreMembership(HashStore(), 0, Generation(0, dict.fromkeys(range(3), 0)), lambda: LONG_S)
    pauses = [list(islice(member.pauses(Deadline(LONG_S)), 12)) for member in (new, first)]
    assert pauses[0] == pauses[1]


def test_a_short_deadline_is_polled_in_time():
    member = StoreMembership(HashStore(), 9, Generation(0, dict.fromkeys(range(30), 0)), lambda: LONG_S)
    assert max(islice(member.pauses(Deadline(0.2)), 12)) == pytest.approx(0.05)


# collectives


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_collective_begins_when_all_members_have_come(ranks):
    found = members(ranks)
    for _ in range(3):
        assert at_once([arriving(member) for member in found]) == [tuple(range(ranks))] * ranks
        for member in found:
            member.calls.leave()
    end(found)


def test_collectives_leave_no_more_keys_on_the_store_the_more_there_are():
    store = HashStore()
    found = members(3, store=store)

    def call_and_vote(member):
        arriving(member)()
        assert member.calls.vote(ok=True, generation=member.generation)
        member.calls.leave()

    counts = []
    for _ in range(4):
        at_once([lambda member=member: call_and_vote(member) for member in found])
        counts.append(store.num_keys())
    assert counts[1:] == counts[1:2] * 3
    end(found)


def test_a_member_that_does_not_come_in_time_is_evicted_and_the_others_begin():
    found = members(3)
    assert until_the_deadline([arriving(member) for member in found[:2]]) == [(0, 1)] * 2
    assert found[0].current().ranks == (0, 1)
    with pytest.raises(Evicted, match=r"did not come to save\(\) within"):
        arriving(found[2])()
    end(found)


@pytest.mark.parametrize("how", ["finished", "gone"])
def test_a_member_that_has_left_is_not_waited_for(how):
    found = members(3)
    found[1].depart("it closed its world", finished=True) if how == "finished" else found[1].processes.close()
    begin_s = monotonic()
    assert at_once([arriving(member) for member in found[::2]]) == [(0, 2)] * 2
    assert monotonic() - begin_s < LONG_S / 2
    assert [loss.finished for loss in found[0].current().lost] == [how == "finished"]
    end(found)


def test_no_rank_is_evicted_if_too_few_come_and_the_error_names_the_missing_ranks():
    found = members(3, needed=2)
    (error,) = until_the_deadline([arriving(found[0])])
    assert isinstance(error, DeadlineExceeded)
    assert "ranks [1, 2] are missing (it did not come to save() within 20 s)" in str(error)
    assert found[0].current().ranks == (0, 1, 2)
    end(found)


def test_ranks_that_come_to_different_collectives_all_learn_it():
    found = members(3)
    errors = at_once([arriving(found[0]), arriving(found[1], "load()"), arriving(found[2])])
    assert {type(error) for error in errors} == {DisagreementError}
    assert all("make the same collective calls in the same order on all ranks" in str(error) for error in errors)
    end(found)


def test_a_rank_that_comes_to_another_collective_does_not_go_on_to_meet_the_others_later():
    found = members(2)
    at_once([arriving(found[0]), arriving(found[1], "load()")])
    assert at_once([arriving(found[0], "next()"), arriving(found[1], "next()")]) == [(0, 1)] * 2
    end(found)


# votes


@given(st.lists(st.booleans(), min_size=1, max_size=7))
def test_a_part_counts_only_if_all_members_vote_for_it(said):
    found = members(len(said))
    votes = at_once([lambda m=m, ok=ok: m.calls.vote(ok, m.generation) for m, ok in zip(found, said, strict=True)])
    assert set(votes) == {all(said)}
    end(found)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_part_does_not_count_if_a_member_does_not_vote(silent):
    found = members(3)
    voters = [member for rank, member in enumerate(found) if rank != silent]
    voting = [lambda m=m: m.calls.vote(True, m.generation) for m in voters]
    assert until_the_deadline(voting) == [False, False]
    end(found)


@pytest.mark.parametrize("silent", [0, 2])
def test_the_vote_of_a_process_that_is_gone_is_not_waited_for(silent):
    found = members(3)
    found[silent].processes.close()
    begin_s = monotonic()
    voters = [member for rank, member in enumerate(found) if rank != silent]
    assert at_once([lambda m=m: m.calls.vote(True, m.generation) for m in voters]) == [False, False]
    assert monotonic() - begin_s < LONG_S / 2
    end(found)


def test_a_member_that_votes_against_a_part_does_not_wait_for_the_others():
    found = members(3)
    assert found[1].calls.vote(False, found[1].generation) is False
    end(found)


def test_a_refusal_in_place_of_a_vote_tells_all_members_the_reason():
    found = members(3)
    refusing = [
        lambda: found[0].calls.refuse("the dtype is wrong", found[0].generation),
        *(lambda m=m: m.calls.vote(True, m.generation) for m in found[1:]),
    ]
    _, *errors = at_once(refusing)
    assert [str(error) for error in errors] == ["rank 0 refused: the dtype is wrong"] * 2
    end(found)


# a new process in a lost rank's place


def replacement(store, rank, ranks):
    founders = Generation(0, dict.fromkeys(range(ranks), 0))
    return StoreMembership(store, rank, founders, lambda: LONG_S, host="127.0.0.1", needed=1)


def answering(found, needed=1, late_s=()):
    """The members, which answer roll calls as they train; and call one if they were silent."""
    for member in found:
        member.needed = needed

        def answer(number, member=member):
            Event().wait(dict(late_s).get(member.rank, 0.0))
            while number > member.generation.number or member.rank in member.generation.silent:
                member.adopt(member.roll_call(0, int))

        member._on_roll_call = answer  # the tests above call it themselves
    return found


def test_a_replacement_of_a_live_process_is_refused():
    found = members(2, store=(store := HashStore()))
    with pytest.raises(UsageError, match=r"a process of rank 1 is a member and answers: another can take its place"):
        replacement(store, 1, 2).join_as_replacement(lambda: True)
    end(found)


@pytest.mark.parametrize("was_evicted", [True, False], ids=["evicted", "dead"])
def test_a_replacement_becomes_a_member_and_the_old_process_is_evicted(was_evicted):
    found = members(2, store=(store := HashStore()))
    if was_evicted:
        until_the_deadline(roll_calls(found[:1], [4]))
        found[0].adopt(found[0].current())
    else:
        found[1].processes.close()
    answering(found[:1])
    new = replacement(store, 1, 2)
    new.join_as_replacement(lambda: True)
    assert found[0].current().members == {0: 0, 1: 1}
    assert new.current().ranks == (0, 1)
    with pytest.raises(Evicted):
        found[1].current()
    end([*found, new])


def test_only_one_of_two_replacements_for_a_rank_becomes_a_member():
    found = members(2, store=(store := HashStore()))
    found[1].processes.close()
    answering(found[:1])
    new = [replacement(store, 1, 2) for _ in range(2)]

    def join(each):
        each.join_as_replacement(lambda: True)
        return each

    taken = [each for each in at_once([lambda each=each: join(each) for each in new]) if each in new]
    ends = at_once([each.current for each in taken])
    assert [isinstance(each, Generation) for each in ends].count(True) == 1
    assert {type(each) for each in ends} <= {Generation, Evicted}
    end([*found, *new])


def test_a_replacement_is_not_admitted_during_a_collective():
    found = members(2, store=(store := HashStore()))
    until_the_deadline(roll_calls(found[:1], [4]))
    found[0].adopt(found[0].current())
    arriving(found[0])()
    late = replacement(store, 1, 2)
    (error,) = until_the_deadline([lambda: late.join_as_replacement(lambda: True)])
    assert "are in a collective, or did not answer" in str(error)
    answering(found[:1])
    found[0].calls.leave()
    new = replacement(store, 1, 2)
    new.join_as_replacement(lambda: True)
    assert new.current().ranks == (0, 1)
    end([*found, new])


def test_a_new_process_makes_a_step_possible_beside_a_member_that_is_silent():
    found = members(3, store=(store := HashStore()))
    answering(found[:1], needed=2)
    found[2].processes.close()
    new = replacement(store, 2, 3)
    begin_s = monotonic()
    new.join_as_replacement(lambda: True)
    assert monotonic() - begin_s < LONG_S / 2
    generation = found[0].current()
    assert (generation.ranks, generation.connected) == ((0, 1, 2), (0, 2))
    end([*found, new])


def test_a_new_process_that_is_gone_does_not_become_a_member():
    found = members(3, store=(store := HashStore()), needed=1)
    found[2].processes.close()
    new = replacement(store, 2, 3)
    new.processes.replace()
    new.store.append(joining_key(found[0].generation), "[2, 1, 0]\n")
    new.processes.close()
    assert {generation.ranks for generation in roll_call(found[:2], [4, 4])} == {(0, 1)}
    end([*found, new])


def test_a_new_process_whose_state_is_of_before_a_collective_is_not_admitted():
    found = members(3, store=(store := HashStore()))
    answering(found[:2])
    found[2].processes.close()
    new, tried = replacement(store, 2, 3), []

    def fetch_while_others_make_a_collective():
        if not tried:
            found[0].change(found[0].head(), collective=1)
        tried.append(found[0].head().collective)
        return True

    new.join_as_replacement(fetch_while_others_make_a_collective)
    assert (len(tried), new.collective) == (2, 1)
    end([*found, new])


def test_a_replacement_is_refused_where_all_others_have_finished():
    found = members(2, store=(store := HashStore()))
    found[1].processes.close()
    found[0].depart("it closed its world", finished=True)
    with pytest.raises(UsageError, match="all others have finished or are gone"):
        replacement(store, 1, 2).join_as_replacement(lambda: True)
    end(found)


def test_gpus_connect_without_a_silent_member():
    membership, asked = object.__new__(ElasticMembership), []
    membership._transport = SimpleNamespace(rank=0, gpus=["cuda:0"], timeout_s=LONG_S, add=lambda *_: None)
    membership._world = SimpleNamespace(
        reconnect_options=SimpleNamespace(connect=lambda _, ranks, __: asked.append(ranks) or ()),
        connect_gpu=lambda _, __, ranks: asked.append(ranks),
    )
    membership.on_store = members(1)[0]
    membership._comm_thread, membership.wanted = SimpleNamespace(failure=None), 0
    membership._connect(Generation(1, dict.fromkeys(range(3), 0), silent=(1,)))
    assert asked == [(0, 2), (0, 2)]
