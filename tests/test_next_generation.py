# SPDX-License-Identifier: Apache-2.0
"""The rules of generations, checked exhaustively: every small case of one decision, and every order of events of a few.

In a model a state is what the store holds, who lives, and what each rank has seen; a rank may look, and propose what
follows much later. Ranks die, stop for any time, and wake up; time passes for all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple

import pytest

from commrt.elastic.next_generation import PATIENCE_S, Attendance, Terms, next_generation
from commrt.elastic.records import Arrival
from commrt.errors import CommrtError, DeadlineExceeded, QuorumLost
from commrt.runtime.generation import Generation, Loss

TIMEOUT_S = 20.0
WAITED_S = (0.0, PATIENCE_S, 2.0, TIMEOUT_S)
"""In between nothing changes: the shorter and the longer patience, and the deadline."""
STATES = HERE, CUT, SILENT, GONE, LEFT, JOINING, DIED = "here", "cut off", "silent", "gone", "left", "joining", "died"
"""One is cut off from the next rank, and one died after it had come."""


def enough(count, ranks, needed):
    return 2 * count >= ranks and count >= needed


def decided(seen, terms):
    """What follows: a generation, None, or the kind of the error."""
    try:
        return next_generation(seen, terms)
    except CommrtError as error:
        return type(error)


def cases(ranks):
    """Every case of so many ranks, of which rank 0 decides."""
    states = product(STATES, repeat=ranks - 1)
    terms = [(0, False), *product(range(1, ranks + 1), (False, True))]
    silent = [combinations(range(1, ranks), count) for count in range(ranks)]
    for others, before, term, *seen in product(states, chain(*silent), terms, (False, True), WAITED_S):
        generation = Generation(7, dict.fromkeys(range(ranks), 0), 3, silent=before)
        yield (HERE, *others), generation, Terms(0, TIMEOUT_S, "it is late", *term), *seen


def check_decision(states, generation, terms, is_running, waited_s):
    """Check one decision against what is promised; return its kind."""
    at = {state: {rank for rank, each in enumerate(states) if each == state} for state in STATES}
    ranks, here, joining, gone = len(states), at[HERE] | at[CUT], at[JOINING], at[GONE] | at[LEFT] | at[DIED]
    links = {frozenset({rank, (rank + 1) % ranks}) for rank in at[CUT]}
    broken = {link for link in links if len(link) == 2 and link <= here}
    missed = {r: [(r + 1) % ranks] * (r in at[CUT]) + sorted(at[DIED] - {r}) for r in sorted(here | at[DIED])}
    arrivals = {r: Arrival(r + 4, unreached=peers) for r, peers in missed.items()}
    departed = [Loss(rank, 0, "its process is gone", rank in at[LEFT]) for rank in sorted(gone)]
    seen = Attendance(generation, arrivals, departed, dict.fromkeys(joining, 1), is_running, waited_s)
    found, is_late = decided(seen, terms), waited_s >= TIMEOUT_S
    if found is None:
        assert not is_late, "progress: nobody waits for ever"
        assert at[SILENT] or broken, "nobody is waited for"
    elif found is DeadlineExceeded:
        assert is_late, "too early"
        assert at[SILENT] or broken, "nobody is missing"
    elif found is QuorumLost:
        assert not enough(ranks - len(at[GONE] | at[DIED]), ranks, terms.needed), "those that live would be enough"
    else:
        lost = {loss.rank for loss in found.lost}
        assert (found.number, found.start) == (8, max(here) + 4)
        assert sorted([*found.ranks, *lost]) == [*range(ranks)]
        assert lost >= gone, "a dead rank stays"
        assert all(found.members[rank] == (rank in joining) for rank in found.members)
        assert is_late or lost == gone, "a live rank is left out before the deadline"
        assert not lost & here or all(any(rank in link for link in broken) for rank in lost & here)
        assert not any(link <= {*found.connected} for link in broken), "two members do not reach each other"
        assert {*found.silent} <= at[SILENT]
        if found.silent:
            assert (terms.may_be_silent, is_running, waited_s >= PATIENCE_S) == (True, False, True)
            assert enough(len(found.connected), ranks, terms.needed)
            is_first = not generation.silent or {*found.silent} <= {*generation.silent}
            assert is_first or waited_s >= 2.0, "two slow ranks leave out each other for ever"
        assert enough(len(found.ranks) + len(at[LEFT]), ranks, terms.needed), "a minority goes on"
    if not (at[SILENT] or broken):
        assert found is not None, "all have come, and are waited for"
    return found if found in (None, DeadlineExceeded, QuorumLost) else Generation


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_decision_keeps_all_promises_in_every_case(ranks):
    kinds = {check_decision(*case) for case in cases(ranks)}
    assert kinds == ({Generation} if ranks == 1 else {Generation, QuorumLost, DeadlineExceeded, None})


class Members(dict):
    def __hash__(self):
        return hash(tuple(self.items()))


class State(NamedTuple):
    formed: tuple  # all generations so far; the last one is the store's
    adopted: tuple  # of each rank: the number of its generation; an error that has ended it
    lives: tuple  # of each rank: "lives", "stopped" or "dead"
    come: frozenset = frozenset()  # to the roll call after the latest generation
    proposals: tuple = ()  # of each rank: what it will propose, where it has looked
    waited: int = 0  # in this roll call, as a place in WAITED_S


@dataclass(frozen=True)
class Model:
    """So many ranks, at most so many deaths and stops, and links that do not work."""

    ranks: int
    needed: int = 0
    deaths: int = 0
    stops: int = 0
    broken: tuple = ()

    def successors(self, state):
        head = state.formed[-1]
        if head.number > 1:
            return
        for rank in range(self.ranks):
            if state.lives[rank] == "lives":
                yield from self.steps(state, rank, head)
                if state.lives.count("dead") < self.deaths:
                    yield state._replace(lives=put(state.lives, rank, "dead"))
                if state.lives.count("stopped") < self.stops:
                    yield state._replace(lives=put(state.lives, rank, "stopped"))
            elif state.lives[rank] == "stopped":
                yield state._replace(lives=put(state.lives, rank, "lives"))
        if state.waited + 1 < len(WAITED_S) and state.come:
            yield state._replace(waited=state.waited + 1)

    def steps(self, state, rank, head):
        """What one rank may do next: propose, follow the others, answer, look."""
        own, proposal = state.adopted[rank], state.proposals[rank]
        if own == "ended":
            return
        if proposal is not None:
            yield self.proposed(state, rank, head, proposal)
        elif own < head.number:
            yield state._replace(adopted=put(state.adopted, rank, head.number if rank in head.members else "ended"))
        elif rank not in state.come:
            is_noticed = any(state.lives[member] == "dead" for member in head.members)
            if head.number == 0 or state.come or head.silent or is_noticed:  # else nobody calls
                yield state._replace(come=state.come | {rank})
        else:
            for waited in range(state.waited + 1):  # one that came later has waited less
                yield from self.looked(state, rank, head, WAITED_S[waited])

    def looked(self, state, rank, head, waited_s):
        cut = {each: [b for a, b in self.broken if a == each] for each in range(self.ranks)}
        here = {each: Arrival(0, unreached=cut[each]) for each in sorted(state.come)}
        dead = [r for r in head.members if r not in here and (state.lives[r] == "dead" or state.adopted[r] == "ended")]
        seen = Attendance(head, here, [Loss(each, 0, "its process is gone") for each in dead], waited_s=waited_s)
        found = decided(seen, Terms(rank, TIMEOUT_S, "it is late", self.needed, self.needed > 0))
        if isinstance(found, Generation):
            found = found._replace(members=Members(found.members))
            yield state._replace(proposals=put(state.proposals, rank, found))
        elif found is not None:
            yield state._replace(adopted=put(state.adopted, rank, "ended"), come=state.come - {rank})

    def proposed(self, state, rank, head, proposal):
        state = state._replace(proposals=put(state.proposals, rank, None))
        if proposal.number != head.number + 1:  # the compare-and-set fails
            return state
        return state._replace(formed=(*state.formed, proposal), come=frozenset(), waited=0)

    def check(self, state):
        for before, after in pairwise(state.formed):
            assert enough(len(after.ranks), len(before.ranks), self.needed)
        for rank, own in enumerate(state.adopted):
            assert own == "ended" or rank in state.formed[own].members, "it exchanges, and is no member"

    def check_end(self, state):
        """Check that each rank that lives exchanges with all that go on, or has an error."""
        for rank, own in enumerate(state.adopted):
            if state.lives[rank] == "lives" and own != "ended":
                assert (own, rank in state.formed[-1].connected) == (state.formed[-1].number, True), state

    def explore(self):
        """How many states can be reached; raises AssertionError where a promise is broken."""
        first = Generation(0, Members.fromkeys(range(self.ranks), 0))
        start = State((first,), (0,) * self.ranks, ("lives",) * self.ranks, proposals=(None,) * self.ranks)
        seen, waiting = {start}, deque([start])
        while waiting:
            self.check(state := waiting.popleft())
            following = [*self.successors(state)]
            if not following and state.formed[-1].number <= 1:
                self.check_end(state)
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)


def put(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


MODELS = [
    Model(2, deaths=1),
    Model(3, deaths=1, stops=1),
    Model(3, needed=2, deaths=1, stops=1),
    Model(3, broken=((1, 2),)),
    Model(3, needed=2, broken=((0, 2),), stops=1),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_generations_keep_all_promises_in_every_order_of_events(model):
    assert model.explore() > 20


def test_a_rank_that_answers_again_is_said_to_but_not_a_process_in_its_place():
    before = Generation(1, {0: 0, 1: 0, 2: 0}, silent=(1, 2))
    after = Generation(2, {0: 0, 1: 0, 2: 1})
    assert after.changes_since(before) == ["a new process has the place of rank 2", "rank 1 answers again"]
