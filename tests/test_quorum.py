# SPDX-License-Identifier: Apache-2.0
"""The rules of the quorum, checked exhaustively: every order of events, a death at every instant, false suspicions.

A state is what each rank was answered so far, what the store holds, and who is dead. A rank's next wish follows from
its answers, by running the very generator that training runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from time import perf_counter

import pytest

from commrt.quorum import (
    DONE,
    FAILED,
    VOID,
    Again,
    Append,
    Outcome,
    Read,
    Reduce,
    Settle,
    Survey,
    announced,
    deliberate,
    first,
    key,
)


@dataclass(frozen=True)
class State:
    answers: tuple  # of each rank, to its wishes in order
    store: frozenset = frozenset()
    dead: frozenset = frozenset()
    reduced: frozenset = frozenset()  # (rank, step, attempt, went well), of those who were answered
    suspicions: int = 0
    voids: int = 0

    def with_answer(self, rank, answer, **more):
        answers = list(self.answers)
        answers[rank] = (*answers[rank], answer)
        return replace(self, answers=tuple(answers), **more)


@dataclass
class Model:
    """`needed` of `needed + backups` ranks; at most so many deaths, false suspicions and attempts that are ended."""

    needed: int
    backups: int
    steps: int = 1
    deaths: int = 0
    suspicions: int = 0
    voids: int = 0
    rule: object = deliberate
    first_knows: bool = True
    """For the first member a reduction goes well only if all others have the sum."""
    wishes: dict = field(default_factory=dict, repr=False)

    @property
    def ranks(self):
        return range(self.needed + self.backups)

    def life(self, rank):
        """All steps of a rank; a dropped one takes the weights of another and goes on."""
        outcomes = ()
        for step in range(self.steps):
            outcomes = (*outcomes, (yield from self.rule(rank, 0, self.needed, step)))
        return list(outcomes)

    def wish(self, rank, answers):
        """What a rank wants next, or the outcomes of its steps."""
        if (rank, answers) not in self.wishes:
            life = self.life(rank)
            try:
                wish = next(life)
                for answer in answers:
                    wish = life.send(answer)
            except StopIteration as end:
                wish = end.value
            self.wishes[rank, answers] = wish
        return self.wishes[rank, answers]

    def successors(self, state):
        for rank in self.ranks:
            if rank in state.dead:
                continue
            wish = self.wish(rank, state.answers[rank])
            if isinstance(wish, list):
                continue
            yield from self.answered(state, rank, wish)
            if len(state.dead) < self.deaths:
                yield replace(state, dead=state.dead | {rank})

    def answered(self, state, rank, wish):
        store = dict(state.store)
        if isinstance(wish, Append):
            store[wish.key] = store.get(wish.key, "") + wish.word
            yield state.with_answer(rank, None, store=frozenset(store.items()))
        elif isinstance(wish, Settle):
            store.setdefault(wish.key, wish.value)
            yield state.with_answer(rank, None, store=frozenset(store.items()))
        elif isinstance(wish, Survey):
            yield state.with_answer(rank, tuple(store.get(name, "0") for name in wish.keys))
        elif isinstance(wish, Again):
            yield state.with_answer(rank, wish.generation)
        elif isinstance(wish, Read):
            yield from self.read(state, rank, wish, store)
        elif isinstance(wish, Reduce):
            yield from self.reductions(state, rank, wish, store)

    def read(self, state, rank, wish, store):
        """Who waits looks after the others, as `commrt.ballot` does."""
        if wish.key in store:
            yield state.with_answer(rank, store[wish.key])
        elif wish.members:
            if state.dead & set(wish.members):
                yield replace(state, store=state.store | {(wish.key, FAILED)})
        else:
            said = store[key(wish.step, wish.attempt, "announced")]
            generation = max(int(word.split("@")[1]) for word in said.split())
            order = announced(said, generation)
            if len(order) >= self.needed:  # who came last may have died before it said so
                yield replace(state, store=state.store | {(wish.key, first(order, self.needed))})
            elif state.voids < self.voids:
                yield replace(state, store=state.store | {(wish.key, VOID)}, voids=state.voids + 1)

    def reductions(self, state, rank, wish, store):
        """It goes well only if all have come to it, for the first member if all others are through.

        It goes badly only if one is gone, gave up, or is suspected.
        """
        place = wish.step, wish.attempt
        others = [member for member in wish.members if member != rank]
        if rank == wish.members[0] and self.first_knows:
            is_whole = all((member, place, True) in state.reduced for member in others)
        else:
            is_whole = all(place in self.places(state, member) for member in others)
        if is_whole:
            yield state.with_answer(rank, True, reduced=state.reduced | {(rank, place, True)})
        gave_up = any((member, place, False) in state.reduced for member in wish.members)
        after = state.reduced | {(rank, place, False)}
        if gave_up or state.dead & set(wish.members):
            yield state.with_answer(rank, False, reduced=after)
        elif state.suspicions < self.suspicions:
            yield state.with_answer(rank, False, reduced=after, suspicions=state.suspicions + 1)

    def places(self, state, rank):
        """The reductions that a rank has come to."""
        answers = state.answers[rank]
        wishes = (self.wish(rank, answers[:i]) for i in range(len(answers) + 1))
        return {(wish.step, wish.attempt) for wish in wishes if isinstance(wish, Reduce)}

    def explore(self):
        """How many states can be reached; raises AssertionError where a promise is broken."""
        start = State(tuple(() for _ in self.ranks))
        seen, waiting = {start}, deque([start])
        while waiting:
            state = waiting.popleft()
            self.check(state)
            following = list(self.successors(state))
            if not following:
                self.check_end(state)
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)

    def outcomes(self, state):
        ends = {rank: self.wish(rank, state.answers[rank]) for rank in self.ranks}
        return {rank: end for rank, end in ends.items() if isinstance(end, list)}

    def check(self, state):
        """All who passed a step applied the same; nobody applied what others can never get."""
        for step in range(self.steps):
            applied = {end[step].members for end in self.outcomes(state).values()}
            assert len(applied) <= 1, (step, applied)
            assert all(len(members) == self.needed for members in applied)
            for rank, end in self.outcomes(state).items():
                place = step, end[step].attempt
                assert not end[step].counts or (rank, place, True) in state.reduced, "it applies what it has not"
            for members in applied:
                assert set(members) - state.dead, "nobody is left who has the sum"

    def check_end(self, state):
        """Nothing more can happen: then all who live have finished, if they are enough."""
        living = [rank for rank in self.ranks if rank not in state.dead]
        if len(living) >= self.needed:
            assert set(living) <= set(self.outcomes(state)), state


CASES = [
    Model(2, 0, steps=3),
    Model(2, 1, steps=2),
    Model(2, 1, deaths=1),
    Model(2, 1, voids=1),
]
MANY = [
    Model(2, 1, deaths=1, voids=1),
    Model(2, 1, steps=2, deaths=1),
    Model(2, 1, suspicions=1),
    Model(2, 1, deaths=1, suspicions=1),
    Model(3, 1, deaths=1),
    Model(2, 1, steps=3),
]
"""For ``python tests/test_quorum.py``."""


def described(model):
    bounds = f"{model.deaths} deaths, {model.suspicions} false suspicions, {model.voids} voids"
    return f"{model.needed}+{model.backups} ranks, {model.steps} steps, {bounds}"


@pytest.mark.parametrize("model", CASES, ids=described)
def test_in_every_order_of_events_all_apply_the_same_gradients_and_all_who_live_go_on(model):
    assert model.explore() > 100


def without_waiting_for_done(rank, generation, needed, step):
    """As `deliberate`, but a member that has the sum uses it at once."""
    course = deliberate(rank, generation, needed, step)
    wish = next(course)
    while True:
        answer = yield wish
        if isinstance(wish, Reduce) and answer:
            yield Settle(key(step, wish.attempt, "outcome"), DONE if rank == wish.members[0] else "")
            return Outcome(wish.members, True, wish.attempt)
        try:
            wish = course.send(answer)
        except StopIteration as end:
            return end.value


def without_a_gradient_for_another_attempt(rank, generation, needed, step):
    """As `deliberate`, but a member has used its gradient when the attempt fails, and can announce it no more."""
    course = deliberate(rank, generation, needed, step)
    wish, had_sum = next(course), False
    while not (had_sum and isinstance(wish, Again)):
        answer = yield wish
        had_sum = had_sum or (isinstance(wish, Reduce) and answer)
        try:
            wish = course.send(answer)
        except StopIteration as end:
            return end.value
    yield Read("never", step, wish.generation, (rank,))


@pytest.mark.parametrize(
    "model",
    [
        Model(2, 1, deaths=1, rule=without_waiting_for_done),
        Model(2, 1, deaths=1, rule=without_a_gradient_for_another_attempt),
        Model(2, 1, deaths=1, first_knows=False),
        Model(1, 1, deaths=1),
    ],
    ids=["apply on own completion", "unpack before done", "done before all have it", "as many backups as members"],
)
def test_shortcuts_are_refuted(model):
    with pytest.raises(AssertionError):
        model.explore()


def main():
    for model in MANY:
        begin_s = perf_counter()
        states = model.explore()
        print(f"{described(model)}: {states:,} states, no promise broken ({perf_counter() - begin_s:.0f} s)")  # noqa: T201  # a command


if __name__ == "__main__":
    main()
