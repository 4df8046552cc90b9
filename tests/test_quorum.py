# SPDX-License-Identifier: Apache-2.0
"""The rules of the quorum, checked exhaustively: every order of events, a death at every instant, false suspicions.

A state is what each rank was answered so far, what the store holds, and who is dead. A rank's next request follows from
its answers, by running the very function that training runs up to its first request without an answer. Another process
may take the place of a dead one at any instant, with the weights of any rank that lives; it calls all others to a new
generation. Or a further process comes, with which a step needs one gradient more from its generation on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from random import Random
from time import perf_counter
from typing import NamedTuple

import pytest

from commrt.backup_workers import quorum
from commrt.backup_workers.quorum import (
    DONE,
    FAILED,
    NO_MEMBERS,
    OLDEST_STEP,
    Announcement,
    StepOutcome,
    choose_members,
    decide,
    parse_announcements,
    quorum_key,
)

DIES = 0.02
"""How likely the next event is a rank's death, if one may die."""


class Append(NamedTuple):
    key: str
    word: str


class SetOnce(NamedTuple):
    key: str
    value: str


class ReadNow(NamedTuple):
    keys: tuple


class WaitFor(NamedTuple):
    key: str
    step: int
    attempt: int
    members: tuple = ()


class Reduce(NamedTuple):
    step: int
    attempt: int
    members: tuple


class NextAttempt(NamedTuple):
    generation: int


class Unanswered(Exception):
    """A request that has no answer yet."""


class Asked:
    """The requests of one rank: gives the answers that it got, in order, and stops it at the next request."""

    def __init__(self, begin, answers):
        self.begin, self.generation, self.needed = begin, begin.generation, begin.needed
        self.came = {*begin.came}
        self.used, self._answers = begin.used, answers

    def _answer(self, operation):
        if isinstance(operation, Reduce):
            self.came.add((operation.step, operation.attempt, self.generation))
        if self.used == len(self._answers):
            raise Unanswered(operation)
        self.used += 1
        return self._answers[self.used - 1]

    def announce(self, key, word):
        self._answer(Append(key, word))
        return self._answer(ReadNow((OLDEST_STEP, key)))

    def set_once(self, key, value):
        return self._answer(SetOnce(key, value))

    def wait_for(self, key, step, attempt, members=()):
        return self._answer(WaitFor(key, step, attempt, members))

    def reduce(self, step, attempt, members):
        return self._answer(Reduce(step, attempt, members))

    def next_attempt(self, generation):
        self.follow(generation)
        self.note(attempt=self.begin.attempt + 1)
        return self.generation

    def follow(self, generation):
        self.generation, self.needed = self._answer(NextAttempt(generation))

    def note(self, **changes):
        """Here another run may begin."""
        now = {"generation": self.generation, "needed": self.needed, "used": self.used, "came": frozenset(self.came)}
        self.begin = self.begin._replace(**now, **changes)


class Answers:
    """What a rank was answered, in order. The same answers are the same object, which costs nothing to compare."""

    def __init__(self, before=None, said=()):
        self.before, self.said, self._following = before, said, {}

    def __repr__(self):
        return repr(self.said)

    def then(self, answer):
        if answer not in self._following:
            self._following[answer] = Answers(self, (*self.said, answer))
        return self._following[answer]


NO_ANSWERS = Answers()


class State(NamedTuple):
    answers: tuple  # of each rank, to its operations
    begins: tuple  # of each rank: the step and the generation in which its process began, and what a step needs there
    store: frozenset = frozenset()
    dead: frozenset = frozenset()
    reborn: frozenset = frozenset()  # ranks whose place another process has taken
    called: int = 0  # the generation to which all are called
    needed: int = 0  # so many gradients make a step of that generation
    reduced: frozenset = frozenset()  # (rank, step, attempt, went well), of those who were answered
    suspicions: int = 0
    voids: int = 0

    def with_answer(self, rank, answer, **more):
        answers = list(self.answers)
        answers[rank] = answers[rank].then(answer)
        return self._replace(answers=tuple(answers), **more)


class Begin(NamedTuple):
    """Where a rank began its latest attempt."""

    step: int
    generation: int
    needed: int
    attempt: int = 0
    used: int = 0  # answers
    came: frozenset = frozenset()  # (step, attempt, generation) of the reductions to which it has come
    outcomes: tuple = ()  # of the steps before


class Position(NamedTuple):
    operation: object  # what it asks for next, or the outcomes of its steps
    step: int
    generation: int
    needed: int
    came: frozenset
    begin: Begin


@dataclass
class Model:
    """`needed` of `needed + backups` ranks; at most so many deaths, false suspicions and attempts that are ended."""

    needed: int
    backups: int
    steps: int = 1
    deaths: int = 0
    births: int = 0
    comers: int = 0
    """Ranks that are not there in the beginning."""
    suspicions: int = 0
    voids: int = 0
    rule: object = decide
    first_knows: bool = True
    """For the first member a reduction goes well only if all others have the sum."""
    known_positions: dict = field(default_factory=dict, repr=False)

    @property
    def ranks(self):
        return range(self.needed + self.backups + self.comers)

    def needed_among(self, members):
        """How many gradients make a step of a generation with so many members."""
        return max(self.needed, members - min(self.backups, (members - 1) // 2))

    def life(self, ask, rank):
        """All steps of a process; a dropped rank takes the weights of another and goes on."""
        outcomes = dict(ask.begin.outcomes)
        for step in range(ask.begin.step, self.steps):
            if step > ask.begin.step:
                ask.note(step=step, attempt=0, outcomes=tuple(outcomes.items()))
            if (self.births or self.comers) and not ask.begin.attempt:
                ask.follow(ask.generation)
            outcomes[step] = self.rule(ask, Announcement(rank, ask.generation), step, ask.begin.attempt)
        return outcomes

    def at(self, state, rank):
        """Where the life of a rank is."""
        begin, answers = state.begins[rank], state.answers[rank]
        if (rank, begin, answers) not in self.known_positions:
            self.known_positions[rank, begin, answers] = self.live(rank, begin, answers)
        return self.known_positions[rank, begin, answers]

    def live(self, rank, begin, answers):
        """Where it is after all of these answers."""
        known = self.known_positions.get((rank, begin, answers.before)) if answers.before else None
        ask = Asked(known.begin if known else Begin(*begin), answers.said)
        try:
            operation, step = self.life(ask, rank), self.steps
        except Unanswered as unanswered:
            operation, step = unanswered.args[0], ask.begin.step
        return Position(operation, step, ask.generation, ask.needed, frozenset(ask.came), ask.begin)

    def operation(self, state, rank):
        return self.at(state, rank).operation

    def successors(self, state):
        """What may happen next; where it makes no difference when, it happens first."""
        for rank in self.ranks:
            if rank not in state.dead and (after := self.unseen(state, rank)) is not None:
                return [after, *self.deaths_of(state, rank)]
        each = (chain(self.actions(state, rank), self.deaths_of(state, rank)) for rank in self.ranks)
        return list(chain.from_iterable(each))

    def actions(self, state, rank):
        if rank in state.dead:
            yield from self.replaced(state, rank)
        elif not isinstance(operation := self.operation(state, rank), dict):
            yield from self.answered(state, rank, operation)

    def deaths_of(self, state, rank):
        """Also of one that has passed all steps: others may need its sum."""
        died = len(state.dead) + len(state.reborn) - self.comers
        if rank not in state.dead and died < self.deaths:
            yield state._replace(dead=state.dead | {rank})

    def unseen(self, state, rank):
        """The state after `rank` has read what stands for ever, and is still in the same step; None if it does not."""
        operation, step, *_ = self.at(state, rank)
        said = dict(state.store).get(operation.key) if isinstance(operation, WaitFor) else None
        after = None if said is None else state.with_answer(rank, said)
        return after if after is not None and self.at(after, rank).step == step else None

    def replaced(self, state, rank):
        """Another process takes the place of `rank`, or is the first one there."""
        if len(state.reborn) == self.births + self.comers:
            return
        lives = [self.at(state, other) for other in self.ranks if other not in state.dead]
        called = 1 + max([state.called, *(life.generation for life in lives)])
        needed = self.needed_among(1 + len(lives))
        for step in sorted({life.step for life in lives}):
            yield state._replace(
                answers=tuple(NO_ANSWERS if other == rank else said for other, said in enumerate(state.answers)),
                begins=tuple(
                    (step, called, needed) if other == rank else begin for other, begin in enumerate(state.begins)
                ),
                dead=state.dead - {rank},
                reborn=state.reborn | {rank},
                called=called,
                needed=needed,
            )

    def answered(self, state, rank, operation):
        store = dict(state.store)
        if isinstance(operation, Append):
            store[operation.key] = store.get(operation.key, "") + operation.word
            yield state.with_answer(rank, None, store=frozenset(store.items()))
        elif isinstance(operation, SetOnce):
            stands = store.setdefault(operation.key, operation.value)
            yield state.with_answer(rank, stands, store=frozenset(store.items()))
        elif isinstance(operation, ReadNow):
            yield state.with_answer(rank, tuple(store.get(name, "0") for name in operation.keys))
        elif isinstance(operation, NextAttempt):
            if operation.generation > state.called:  # a roll call
                living = len(self.ranks) - len(state.dead)
                state = state._replace(called=operation.generation, needed=self.needed_among(living))
            yield state.with_answer(rank, (state.called, state.needed))
        elif isinstance(operation, WaitFor):
            yield from self.read(state, rank, operation, store)
        elif isinstance(operation, Reduce):
            yield from self.reductions(state, rank, operation, store)

    def read(self, state, rank, operation, store):
        """Read a key; a waiting rank checks if the others live, as `commrt.backup_workers.quorum` does."""
        if operation.key in store:
            yield state.with_answer(rank, store[operation.key])
        elif operation.members:
            generation = self.at(state, rank).generation
            later = {other for other in state.reborn if state.begins[other][1] > generation}
            if (state.dead | later) & set(operation.members):
                yield state._replace(store=state.store | {(operation.key, FAILED)})
        else:
            _, _, generation, needed, *_ = self.at(state, rank)
            living = len(self.ranks) - len(state.dead)
            order = parse_announcements(store[quorum_key(operation.step, operation.attempt, "announced")], generation)
            if len(order) >= needed:  # who came last may have died before it said so
                yield state._replace(store=state.store | {(operation.key, choose_members(order, needed))})
            elif state.called > generation:
                yield state._replace(store=state.store | {(operation.key, NO_MEMBERS)})
            elif self.needed_among(living) <= living < needed:
                fewer = {"called": generation + 1, "needed": self.needed_among(living)}
                yield state._replace(store=state.store | {(operation.key, NO_MEMBERS)}, **fewer)
            elif state.voids < self.voids:
                yield state._replace(store=state.store | {(operation.key, NO_MEMBERS)}, voids=state.voids + 1)

    def reductions(self, state, rank, operation, store):
        """It goes well only if all have come to it, for the first member if all others are through.

        It goes badly only if one is gone, gave up, or is suspected.
        """
        place, generation = (operation.step, operation.attempt), self.at(state, rank).generation
        settled = parse_announcements(store[quorum_key(operation.step, operation.attempt, "members")])
        assert {word.generation for word in settled} == {generation}, "through connections that it has not"
        others = [member for member in operation.members if member != rank]
        if rank == operation.members[0] and self.first_knows:
            is_whole = all((member, place, True) in state.reduced for member in others)
        else:
            is_whole = all((*place, generation) in self.at(state, member).came for member in others)
        if is_whole:
            yield state.with_answer(rank, True, reduced=state.reduced | {(rank, place, True)})
        gave_up = any((member, place, False) in state.reduced for member in operation.members)
        after = state.reduced | {(rank, place, False)}
        has_left = any(self.at(state, member).generation != generation for member in operation.members)
        if gave_up or has_left or state.dead & set(operation.members):
            yield state.with_answer(rank, False, reduced=after)
        elif state.suspicions < self.suspicions:
            yield state.with_answer(rank, False, reduced=after, suspicions=state.suspicions + 1)

    def start(self):
        absent = frozenset(self.ranks[len(self.ranks) - self.comers :])
        begins = tuple((0, 0, self.needed) for _ in self.ranks)
        return State(tuple(NO_ANSWERS for _ in self.ranks), begins, dead=absent, needed=self.needed)

    def explore(self):
        """How many states can be reached; raises AssertionError where a promise is broken."""
        seen, waiting = {self.start()}, deque([self.start()])
        while waiting:
            state = waiting.popleft()
            self.check(state)
            following = self.successors(state)
            if not following:
                self.check_end(state)
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)

    def walk(self, draw):
        """One order of events, drawn at random; how many there were."""
        state, count = self.start(), 0
        while following := self.drawn(state, draw):
            state, count = draw.choice(following), count + 1
            self.check(state)
        self.check_end(state)
        return count

    def drawn(self, state, draw):
        """What one of the ranks may do next, or may happen to it."""
        for rank in draw.sample(self.ranks, len(self.ranks)):
            dying = list(self.deaths_of(state, rank)) if draw.random() < DIES else []
            if found := dying or list(self.actions(state, rank)):
                return found
        return []

    def outcomes(self, state):
        ends = {rank: self.operation(state, rank) for rank in self.ranks}
        return {rank: end for rank, end in ends.items() if isinstance(end, dict)}

    def check(self, state):
        """Check that all ranks applied the same gradients in a step, and that every rank can still get them."""
        if not (outcomes := self.outcomes(state)):
            return
        for step in range(self.steps):
            ends = {rank: end for rank, end in outcomes.items() if step in end}
            applied = {end[step].members for end in ends.values()}
            assert len(applied) <= 1, (step, applied)
            assert all(len(members) >= self.needed for members in applied)
            for rank, end in ends.items():
                place = step, end[step].attempt
                assert not end[step].counts or (rank, place, True) in state.reduced, "it applies what it has not"
            places = {(step, end[step].attempt) for end in ends.values()}
            for members in applied:
                living = set(self.ranks) - state.dead
                came_later = {rank for rank in living if state.begins[rank][0] > step}
                reduced = {rank for rank in living if places & {came[:2] for came in self.at(state, rank).came}}
                has_sum = set(members) & (living - state.reborn | reduced)
                assert has_sum | came_later, "nobody is left who has the sum"

    def check_end(self, state):
        """Check that all live ranks have finished once nothing more can happen, if they are enough for a step."""
        living = [rank for rank in self.ranks if rank not in state.dead]
        if len(living) >= self.needed:
            assert set(living) <= set(self.outcomes(state)), state


@pytest.fixture(autouse=True)
def texts_are_parsed_once(monkeypatch):
    """As the same ones come again and again."""
    monkeypatch.setattr(quorum, "parse_announcements", cache(parse_announcements))


CASES = [
    Model(2, 0, steps=3),
    pytest.param(Model(2, 1, steps=2), marks=pytest.mark.slow),
    Model(2, 1, deaths=1),
    Model(2, 1, voids=1),
    Model(1, 0, steps=2, comers=1),
    pytest.param(Model(2, 0, comers=1), marks=pytest.mark.slow),
]
WALKS = 20
DRAWN = [
    Model(2, 1, steps=2, deaths=1, births=1),
    Model(3, 2, steps=3, deaths=2, births=2, suspicions=2, voids=2),
    Model(4, 2, steps=4, deaths=2, births=1, suspicions=1, voids=1),
    Model(2, 0, steps=4, deaths=1, comers=2, suspicions=1, voids=1),
    Model(2, 1, steps=4, deaths=2, comers=2, births=1, suspicions=1, voids=1),
]
MANY = [
    Model(2, 1, deaths=1, births=1),
    Model(2, 1, deaths=1, voids=1),
    Model(2, 1, steps=2, deaths=1),
    Model(2, 1, suspicions=1),
    Model(2, 1, deaths=1, suspicions=1),
    Model(3, 1, deaths=1),
    Model(2, 1, steps=3),
]
"""For ``python tests/test_quorum.py``."""


def described(model):
    bounds = f"{model.deaths} deaths, {model.births} births, {model.suspicions} suspicions, {model.voids} voids"
    return f"{model.needed}+{model.backups}+{model.comers} ranks, {model.steps} steps, {bounds}"


@pytest.mark.parametrize("model", CASES, ids=described)
def test_live_ranks_apply_the_same_gradients_and_go_on_in_every_order_of_events(model):
    assert model.explore() > 100


@pytest.mark.parametrize("model", DRAWN, ids=described)
def test_live_ranks_apply_the_same_gradients_in_random_orders_with_replacements(model):
    draw = Random(1)
    assert sum(model.walk(draw) for _ in range(WALKS)) > 30 * WALKS


class Shortcut:
    """Requests that are passed on, but for those of a subclass."""

    def __init__(self, ask, rank):
        self.ask, self.rank = ask, rank

    def __getattr__(self, name):
        return getattr(self.ask, name)


class Ended(Exception):
    """A step has ended early."""


class AppliesAtOnce(Shortcut):
    def reduce(self, step, attempt, members):
        if went_well := self.ask.reduce(step, attempt, members):
            stands = DONE if self.rank == members[0] else ""
            self.ask.set_once(quorum_key(step, attempt, "outcome"), stands)
            raise Ended(StepOutcome(attempt, members, counts=True))
        return went_well


def without_waiting_for_done(ask, mine, step, attempt):
    """As `decide`, but a member that has the sum uses it at once."""
    try:
        return decide(AppliesAtOnce(ask, mine.rank), mine, step, attempt)
    except Ended as end:
        return end.args[0]


class UsesItsGradient(Shortcut):
    had_sum = False

    def reduce(self, step, attempt, members):
        self.had_sum = self.ask.reduce(step, attempt, members)
        return self.had_sum

    def next_attempt(self, generation):
        return self.ask.wait_for("never", 0, 0, (self.rank,)) if self.had_sum else self.ask.next_attempt(generation)


def without_a_gradient_for_another_attempt(ask, mine, step, attempt):
    """As `decide`, but a member has used its gradient when the attempt fails, and can announce it no more."""
    return decide(UsesItsGradient(ask, mine.rank), mine, step, attempt)


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
    for model in DRAWN:
        draw, begin_s = Random(0), perf_counter()
        events = sum(model.walk(draw) for _ in range(2000))
        print(f"{described(model)}: {events:,} events drawn, no promise broken ({perf_counter() - begin_s:.0f} s)")  # noqa: T201  # a command
    for model in MANY:
        begin_s = perf_counter()
        states = model.explore()
        print(f"{described(model)}: {states:,} states, no promise broken ({perf_counter() - begin_s:.0f} s)")  # noqa: T201  # a command


if __name__ == "__main__":
    main()
