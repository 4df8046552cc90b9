# SPDX-License-Identifier: Apache-2.0
"""Generations: all ranks agree on one, late ranks are evicted, and a live rank is not evicted before the deadline."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic
from types import SimpleNamespace

import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from moved_clock import moved_clock
from small_models import backward, trainee
from store_members import LONG_S, member_of, members_of

import commrt
from commrt.elastic.elastic_membership import ElasticMembership
from commrt.elastic.records import GATHERING, OPEN, RUNNING, Arrival, Head
from commrt.elastic.roster import ROLL_CALL, arrival_key, joining_key
from commrt.errors import (
    CommrtError,
    DeadlineExceeded,
    DisagreementError,
    Evicted,
    QuorumLost,
    TransportClosed,
    TransportError,
    UsageError,
)
from commrt.runtime.generation import Generation, Loss
from commrt.testing.ranks import run_ranks
from commrt.threads.deadline import Deadline
from commrt.threads.future import Future


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


def arriving(member):
    """As a rank does: after a change of the generation it goes on in the new one."""
    return lambda: member.calls.arrive("save()", 0, lambda: member.adopt(member.current())).ranks


def arrivals(found):
    return [arriving(member) for member in found]


def votes(found, said):
    return [lambda m=m, ok=ok: m.calls.vote(ok, m.generation) for m, ok in zip(found, said, strict=True)]


def adopt_current(found):
    for member in found:
        member.adopt(member.current())


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
    head = Head(Generation(step, ranks, step, losses, tuple(ranks)[1:]), step, phase)
    assert Head.from_json(head.to_json().encode()) == head
    assert Head.from_json(head.to_json().encode()).to_json() == head.to_json()


def test_a_member_that_does_not_answer_in_time_is_evicted_told_by_whom_and_cannot_come_back(members):
    found = members(2)
    (generation,) = until_the_deadline(roll_calls(found[:1], [4]))
    assert generation.ranks == (0,)
    for call in (*roll_calls(found[1:], [4]), found[1].current, arriving(found[1])):
        with pytest.raises(Evicted, match=r"generation 1 goes on without it: .*roll call.*noticed by rank 0") as raised:
            call()
        assert (raised.value.generation, raised.value.by) == (1, 0)
    assert found[0].current().ranks == (0,)


def test_with_backup_workers_a_silent_member_has_no_connections_until_its_own_roll_call(members):
    found = members(4, needed=3)
    begin_s = monotonic()
    generations = roll_call(found[:3], [4, 4, 4])
    assert monotonic() - begin_s < LONG_S / 2
    assert {(each.ranks, each.connected, each.lost) for each in generations} == {((0, 1, 2, 3), (0, 1, 2), ())}
    adopt_current(found)
    assert {each.connected for each in roll_call(found, [4, 4, 4, 4])} == {(0, 1, 2, 3)}


def test_a_roll_call_in_a_collective_evicts_a_silent_member_at_the_deadline(members):
    found = members(4, needed=3)
    at_once(arrivals(found))
    generations = until_the_deadline(roll_calls(found[:3], [4, 4, 4]))
    assert {(each.ranks, each.silent) for each in generations} == {((0, 1, 2), ())}


def test_ranks_that_answer_late_do_not_leave_out_each_other_for_ever(members):
    found = answering(members(5), needed=3, late_s={3: 0.3, 4: 0.6})
    found[0].adopt(found[0].roll_call(0, int))
    waited = Deadline(LONG_S)
    while (now := found[0].current()).silent or now.number < 2:
        assert waited.left_s > 0
        Event().wait(0.05)
    assert now.number < 9


def test_no_collective_begins_while_a_member_has_no_connections(members):
    found = members(3, needed=2)
    roll_call(found[:2], [4, 4])
    adopt_current(found)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(at_once, arrivals(found))
        while len(found[0].roster.arrivals(arrival_key(found[0].generation, 1))) < 3:
            Event().wait(0.01)
        roll_call(found, [4, 4, 4])
        assert begun.result(LONG_S) == [(0, 1, 2)] * 3
    assert {member.generation.silent for member in found} == {()}


def test_a_collective_waits_for_a_member_that_was_silent_in_a_roll_call(members):
    found = members(3, needed=2)
    roll_call(found[:2], [4, 4])
    adopt_current(found[:2])
    assert until_the_deadline(arrivals(found[:2])) == [(0, 1)] * 2
    with pytest.raises(Evicted, match=r"did not come to save\(\) within"):
        found[2].current()


def break_links(found, links, heal=Event()):  # noqa: B008  # one that never happens
    """Let the first rank of each link hear nothing of the second, until `heal` is set."""
    for member in found:
        unreached = {peer for rank, peer in links if rank == member.rank}

        def check(_, unreached=unreached):
            return SimpleNamespace(look=lambda *_: set() if heal.is_set() else set(unreached), close=int)

        member.processes.check_links = check


@for_each(
    ("links", "leaving"),
    [
        ([(1, 3), (3, 1)], [{1: [3], 3: [1]}]),
        ([(1, 3)], [{1: [3], 3: [1]}]),
        ([(3, 1)], [{1: [3], 3: [1]}]),
        ([(1, 0), (1, 2), (3, 1)], [{1: [0, 2, 3]}]),
        ([(0, 2), (1, 3)], [{1: [3], 3: [1]}, {0: [2], 2: [0]}]),
    ],
)
def test_of_ranks_that_do_not_reach_each_other_as_few_as_possible_are_evicted_and_all_ends_named(links, leaving):
    with members_of(4) as found:
        break_links(found, links)
        evicted = [result for result in until_the_deadline(roll_calls(found, [4] * 4)) if isinstance(result, Evicted)]
        why = {loss.rank: loss.why for loss in found[0].roster.head().generation.lost}
        assert ({error.place.rank for error in evicted}, len(why)) == (why.keys(), len(leaving))
        for either in leaving:
            (rank,) = why.keys() & either
            assert f"it and ranks {either[rank]} did not reach each other within 20 s" in why[rank]


def test_a_link_that_works_again_before_the_deadline_costs_no_rank(members):
    found, heal = members(3), Event()
    break_links(found, [(1, 2)], heal)
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(roll_call, found, [4] * 3)
        while not found[1].roster.arrivals(arrival_key(found[0].generation, ROLL_CALL)).get(1):
            Event().wait(0.01)
        assert found[0].roster.head().generation.number == 0
        heal.set()
        assert {generation.ranks for generation in results.result(LONG_S)} == {(0, 1, 2)}


def test_waiting_ends_when_the_world_does(members):
    def refuse():
        raise TransportClosed("the world was given up")

    with pytest.raises(TransportClosed):
        members(2)[0].roll_call(0, refuse)


@for_each("finished", [False, True])
def test_too_few_remaining_ranks_are_no_error_if_the_others_finished(finished):
    with members_of(4, needed=3) as found:
        for member in found[2:]:
            member.depart("it has no more data", finished=finished)
        ends = roll_call(found[:2], [4, 4])
        text = "it has no more data. Ranks [0, 1] are left, fewer than the 3"
        assert all(each.ranks == (0, 1) if finished else text in str(each) for each in ends)
        if not finished:  # and the same where the first of those that are left has ended by that already
            losses = [*found[1].absent(found[1].generation, [0, 1])[0], Loss(0, 4, f"it failed: {ends[0]}")]
            with pytest.raises(QuorumLost, match=r"Ranks \[0, 1\] are left, fewer than the 3"):
                found[1].require_enough(found[1].generation, 4, losses)


def test_collectives_leave_no_more_keys_on_the_store_the_more_there_are(members):
    found, counts = members(3), []

    def call_and_vote(member):
        arriving(member)()
        assert member.calls.vote(ok=True, generation=member.generation)
        member.calls.leave()

    for _ in range(4):
        at_once([lambda member=member: call_and_vote(member) for member in found])
        counts.append(found[0].store.connection.num_keys())
    assert counts[1:] == counts[1:2] * 3


@pytest.mark.parametrize("how", ["finished", "gone"])
def test_a_member_that_has_left_is_not_waited_for(members, how):
    found = members(3)
    found[1].depart("it closed its world", finished=True) if how == "finished" else found[1].processes.close()
    begin_s = monotonic()
    assert at_once(arrivals(found[::2])) == [(0, 2)] * 2
    assert monotonic() - begin_s < LONG_S / 2
    assert [loss.finished for loss in found[0].current().lost] == [how == "finished"]


def test_a_member_that_dies_after_it_has_come_to_a_roll_call_is_not_waited_for(members):
    found = members(3)
    found[2].roster.arrive(arrival_key(found[2].generation, ROLL_CALL), Arrival(4, unreached=[0, 1]))
    found[2].processes.close()
    begin_s = monotonic()
    assert [generation.ranks for generation in roll_call(found[:2], [4, 4])] == [(0, 1)] * 2
    assert monotonic() - begin_s < LONG_S / 2


def test_ranks_that_made_unequal_numbers_of_steps_do_not_meet_nor_does_one_that_comes_when_they_have_ended(members):
    found = members(3)

    def arriving_after(made, member):
        return lambda: member.calls.arrive("save()", 0, lambda: member.adopt(member.current()), made=made)

    refusals = at_once([arriving_after(6, found[0]), arriving_after(5, found[1])])
    told = "rank {} comes to save() after {} steps where rank {} comes to save() after {} steps: put the loop into"
    assert str(refusals[0]).startswith(told.format(0, 6, 1, 5))
    assert str(refusals[1]).startswith(told.format(1, 5, 0, 6))
    for each in found[:2]:
        each.processes.close()
    with pytest.raises(DisagreementError, match="after 6 steps"):
        arriving_after(6, found[2])()


@for_each(
    ("calls", "why"),
    [(arrivals, " (it did not come to save() within 20 s)"), (lambda found: roll_calls(found, [4]), "")],
)
def test_no_rank_is_evicted_if_too_few_come_and_the_error_names_the_missing_ranks(calls, why):
    with members_of(3, needed=2) as found:
        (error,) = until_the_deadline(calls(found[:1]))
        assert isinstance(error, DeadlineExceeded)
        assert f"ranks [1, 2] are missing{why}" in str(error)
        assert found[0].current().ranks == (0, 1, 2)


def test_a_rank_that_was_stopped_where_a_collective_begins_learns_that_the_others_went_on(members):
    found, goes_on = members(3), Event()
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(at_once, [lambda: found[2].calls.arrive("save()", 0, int, lambda: goes_on.wait(LONG_S))])
        assert at_once(arrivals(found[:2])) == [(0, 1, 2)] * 2
        until_the_deadline(roll_calls(found[:2], [4, 4]))
        adopt_current(found[:2])
        assert at_once(arrivals(found[:2])) == [(0, 1)] * 2  # which deletes what the first collective left
        goes_on.set()
        assert isinstance(stopped.result(LONG_S / 2)[0], Evicted)


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=7))
def test_a_part_counts_only_if_all_members_vote_for_it(said):
    with members_of(len(said)) as found:
        assert set(at_once(votes(found, said))) == {all(said)}


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_part_does_not_count_without_the_vote_of_a_member_and_one_that_is_gone_is_not_waited_for(how, missing):
    with members_of(3) as found:
        voters = found[:missing] + found[missing + 1 :]
        if how == "gone":
            found[missing].processes.close()
        wait = until_the_deadline if how == "silent" else at_once
        begin_s = monotonic()
        assert wait(votes(voters, [True, True])) == [False, False]
        assert monotonic() - begin_s < LONG_S / 2


def replacement(found, rank):
    """Another process of `rank`, which leaves at the end as the members do."""
    new = member_of(found[0].store.connection, rank, ranks=max(member.rank for member in found) + 1, needed=1)
    found.append(new)
    return new


def come(new, fetch_state=lambda: True):
    new.join_as_replacement(fetch_state)
    return new


def answering(found, needed=1, late_s=None):
    """The members, which answer roll calls as they train; and call one if they were silent."""
    for member in found:
        member.needed, member._admits = needed, True

        def answer(number, member=member):
            Event().wait((late_s or {}).get(member.rank, 0.0))
            while number > member.generation.number or member.rank in member.generation.silent:
                member.adopt(member.roll_call(0, int))

        member._on_roll_call = answer  # the tests above call it themselves
    return found


def test_a_replacement_of_a_live_process_is_refused(members):
    with pytest.raises(UsageError, match=r"a process of rank 1 is a member and answers: another can take its place"):
        come(replacement(members(2), 1))


def test_of_two_processes_that_come_to_one_place_the_first_is_told_of_the_other(members):
    found = members(3)
    found[2].processes.close()
    first, second = replacement(found, 2), replacement(found, 2)
    with pytest.raises(UsageError, match="two processes take the place of rank 2 at once: start one"):
        come(first, second.processes.replace)


@pytest.mark.parametrize("was_evicted", [True, False], ids=["evicted", "dead"])
def test_a_replacement_becomes_a_member_and_the_old_process_is_evicted(members, was_evicted):
    found = members(2)
    if was_evicted:
        until_the_deadline(roll_calls(found[:1], [4]))
        adopt_current(found[:1])
    else:
        found[1].processes.close()
    answering(found[:1])
    new = come(replacement(found, 1))
    assert found[0].current().members == {0: 0, 1: 1}
    assert new.current().ranks == (0, 1)
    with pytest.raises(Evicted):
        found[1].current()


def test_a_replacement_is_not_admitted_during_a_collective(members):
    found = members(2)
    until_the_deadline(roll_calls(found[:1], [4]))
    adopt_current(found[:1])
    arriving(found[0])()
    late = replacement(found, 1)
    (error,) = until_the_deadline([lambda: come(late)])
    assert "in its last try ranks [0] were in a collective (save())" in str(error)
    answering(found[:1])
    found[0].calls.leave()
    assert come(replacement(found, 1)).current().ranks == (0, 1)


def test_a_new_process_that_is_gone_does_not_become_a_member(members):
    found = members(3, needed=1)
    found[2].processes.close()
    new = replacement(found, 2)
    new.processes.replace()
    new.store.append(joining_key(found[0].generation), "[2, 1, 0]\n")
    new.processes.close()
    first, second = roll_call(found[:2], [4, 6])
    assert (first.ranks, second.ranks, first.start) == ((0, 1), (0, 1), 6)
    assert [(loss.rank, loss.why) for loss in first.lost] == [(2, "its process is gone")]


def test_a_new_process_whose_state_is_of_before_a_collective_is_not_admitted(members):
    found, tried = members(3), []
    answering(found[:2])
    found[2].processes.close()

    def fetch_while_others_make_a_collective():
        if not tried:
            found[0].roster.change(head := found[0].head(), head._replace(collective=1))
        tried.append(found[0].head().collective)
        return True

    new = come(replacement(found, 2), fetch_while_others_make_a_collective)
    assert (len(tried), new.collective) == (2, 1)


def test_a_replacement_is_refused_where_all_others_have_finished(members):
    found = members(2)
    found[1].processes.close()
    found[0].depart("it closed its world", finished=True)
    with pytest.raises(UsageError, match="all others have finished or are gone"):
        come(replacement(found, 1))


def without_answers(clock, timeout_s):
    """Return what wraps transports so that each transfer after step 0 misses its deadline, as rank 0's clock says."""

    def wrap(transport):
        bind = transport.bind

        def bind_lost(group):
            run = bind(group)

            def exchange(tag):
                if tag.step == 0:
                    return run(tag)
                clock.advance(timeout_s if transport.rank == 0 else 0.0)
                raise DeadlineExceeded("no answer")

            return exchange

        transport.bind = bind_lost
        return transport

    return wrap


@for_each("algorithm", [commrt.Gossip(), commrt.LocalSGD(2), commrt.BackupWorkers(0)])
def test_a_rank_gives_up_two_timeouts_after_a_fault_that_no_roll_call_finds(algorithm):
    def train(world):
        model, optimizer, _ = trainee(world, algorithm=algorithm)
        for step in range(99):
            backward(model, world.rank, step)
            optimizer.step()

    def failure(world):
        try:
            train(world)
        except TransportError as error:
            return str(error)
        return "none: the other rank gave up first, and half of the ranks go on"

    with moved_clock() as clock:
        begin_s = clock.now_s()
        failures = run_ranks(2, failure, LONG_S, without_answers(clock, LONG_S))
        assert any("no answer" in each for each in failures), failures
        assert clock.now_s() - begin_s <= 2 * LONG_S + 5.0


@pytest.mark.timeout(20)
def test_a_rank_that_waits_for_an_answer_sleeps_until_it_comes():
    class ComesIfWaitedFor(Future):
        def exception(self, timeout_s=None):
            self.set_result("an answer")

    assert ElasticMembership.wait_for(SimpleNamespace(require_open=int), ComesIfWaitedFor()) == "an answer"
