# SPDX-License-Identifier: Apache-2.0
"""The meetings of ranks that read each other's memory: all orders of events of small groups, random ones of larger.

What a rank has told and written follows from how far it is in its own program. So a state is a place for each rank,
and whether a rank has failed. A kernel is one event: no kernel waits, so two kernels that nothing orders occur in both
orders, and one of them reads a wrong version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest

from commrt.algorithms import chain, direct, double_tree, gossip, halving_doubling, ring, torus
from commrt.kernels.meeting import BACK
from commrt.program import meetings, program
from commrt.schedule import COPY, Schedule, Step

WRAP = 1 << 32
NEAR_WRAP = WRAP - 3


class Tell(NamedTuple):
    """Write a position into a peer's word."""

    peer: int
    position: int


class Wait(NamedTuple):
    """Wait until a peer has told a position."""

    peer: int
    goal: int


class Look(NamedTuple):
    """Fail if a peer has taken back what it told."""

    peer: int
    begin: int


class Work(NamedTuple):
    """A kernel."""

    reads: tuple
    """(peer, chunk, the version that it must find)"""
    writes: tuple
    """Chunks."""


class Used(NamedTuple):
    """The rank takes what is in its buffer."""


def device_count(run, last):
    """Return where a run begins to count if the counter lies on the device."""
    return run * last


def host_count(run, last):
    """Return what the host would have passed to a graph: always that of the first run."""
    return 0


def difference(one, other):
    """Subtract as int32."""
    return (one - other + WRAP // 2) % WRAP - WRAP // 2


def is_after(told, goal):
    return difference(told, goal) >= 0


@dataclass(frozen=True)
class Rules:
    """How ranks meet; mutants differ in one."""

    plan: object = meetings
    count: object = device_count
    reached: object = is_after
    deadline: bool = True
    takes_back: bool = True
    looks: bool = True


class Place(NamedTuple):
    """How far a rank is."""

    done: int = 0
    """Events."""
    failed: int | None = None
    """After how many events it waited in vain; then it does the events of `Model.rest`."""
    tainted: bool = False
    """It has read what it must not, and does not know."""
    dead: bool = False


class Life(NamedTuple):
    """What a rank does one after the other, and what follows from how far it is."""

    events: list
    told: list
    """[events + 1] its positions, by peer."""
    versions: list
    """[events + 1] how often it has written a chunk, by chunk."""

    @classmethod
    def of(cls, events, told, versions):
        """The life of a rank that begins so."""
        positions = accumulate(events, after_telling, initial=told)
        return cls(events, list(positions), list(accumulate(events, after_writing, initial=versions)))


def after_telling(told, event):
    return told | {event.peer: event.position} if isinstance(event, Tell) else told


def after_writing(versions, event):
    if not isinstance(event, Work):
        return versions
    return tuple(version + (chunk in event.writes) for chunk, version in enumerate(versions))


@dataclass
class Model:
    """Ranks that run a schedule again and again on one buffer, which each fills before a run."""

    schedule: Schedule
    runs: int = 2
    start: int = 0
    rules: Rules = Rules()
    late: bool = False
    """Any wait may end by its deadline."""
    deaths: int = 0

    def __post_init__(self):
        self.programs = [program(self.schedule, rank) for rank in range(self.schedule.ranks)]
        self.written = [self.hop_versions(mine) for mine in self.programs]
        blank = (0,) * self.schedule.chunks
        self.lives = [
            Life.of(list(self.life(mine)), dict.fromkeys(mine.peers, self.start), blank) for mine in self.programs
        ]
        self.rests = {}

    def hop_versions(self, mine):
        """[hops + 1] by chunk, how often a rank has written it before a hop of a run; filling it counts."""
        rows = [np.ones(mine.chunks, dtype=int)]
        for hop in mine.hops:
            rows.append(rows[-1].copy())
            for each in hop.recvs:
                rows[-1][each.lo : each.hi] += 1
        return rows

    def life(self, mine):
        """All events of a rank that never fails."""
        plan = self.rules.plan(mine.hops, mine.chunks, mine.peers)
        for run in range(self.runs):
            begin = self.start + self.rules.count(run, 2 * len(mine.hops) + 1)
            meet = partial(self.meet, sorted(mine.peers), begin)
            yield Work((), tuple(range(mine.chunks)))
            for number, hop in enumerate(mine.hops):
                if plan.before[number] is not None:
                    yield from meet(plan.before[number])
                    yield from self.kernels(run, number, hop, plan.within[number], meet)
            yield from meet(plan.end)
            yield Used()
        yield Work((), tuple(range(mine.chunks)))

    def meet(self, peers, begin, meeting):
        if self.rules.looks:
            yield from (Look(peer, begin % WRAP) for peer in peers)
        yield from (Tell(peer, (begin + meeting.position) % WRAP) for peer in peers)
        yield from (Wait(peer, (begin + need) % WRAP) for peer in peers if (need := meeting.needs.get(peer, 0)))

    def kernels(self, run, number, hop, within, meet):
        read = [tuple(self.sources(run, number, each)) for each in hop.recvs]
        write = [tuple(range(each.lo, each.hi)) for each in hop.recvs]
        if within is None:
            yield from map(Work, read, write)
        else:
            yield from (Work(reads, ()) for reads in read)
            yield from meet(within)
            yield from (Work((), writes) for writes in write)

    def sources(self, run, number, transfer):
        rows = self.written[transfer.peer]
        for chunk in range(transfer.lo, transfer.hi):
            yield transfer.peer, chunk, run * int(rows[-1][chunk]) + int(rows[number][chunk])

    def rest(self, rank, failed):
        """What a rank does after it has waited in vain: all its kernels, and no meetings.

        They count as one kernel, as none of them orders anything, and a chunk that is wrong stays wrong.
        """
        if (rank, failed) not in self.rests:
            life = self.lives[rank]
            back = [Tell(peer, (told - BACK) % WRAP) for peer, told in life.told[failed].items()]
            kernels = [event for event in life.events[failed:] if isinstance(event, Work)]
            written = Work((), tuple({chunk for kernel in kernels for chunk in kernel.writes}))
            events = [*back * self.rules.takes_back, written]
            self.rests[rank, failed] = Life.of(events, life.told[failed], life.versions[failed])
        return self.rests[rank, failed]

    def life_of(self, state, rank):
        place = state[rank]
        return self.lives[rank] if place.failed is None else self.rest(rank, place.failed)

    def successors(self, state):
        """What may happen next, as (rank, place)."""
        for rank, place in enumerate(state):
            life = self.life_of(state, rank)
            if place.dead or place.done == len(life.events):
                continue
            event = life.events[place.done]
            if isinstance(event, Look) and difference(self.told(state, event.peer, rank), event.begin) < -BACK // 2:
                yield rank, Place(0, place.done)
                continue
            if not isinstance(event, Wait) or self.rules.reached(self.told(state, event.peer, rank), event.goal):
                tainted = place.tainted or (isinstance(event, Work) and self.reads_wrong(state, place, event))
                yield rank, place._replace(done=place.done + 1, tainted=tainted)
            if isinstance(event, Wait) and self.may_be_late(state):
                yield rank, Place(0, place.done)
            if sum(each.dead for each in state) < self.deaths:
                yield rank, place._replace(dead=True)

    def told(self, state, rank, peer):
        """What `rank` has told `peer`."""
        return self.life_of(state, rank).told[state[rank].done][peer]

    def may_be_late(self, state):
        """A deadline ends waits for a rank that has failed or died; any wait if some may be `late`."""
        gone = any(place.dead or place.failed is not None for place in state)
        return self.rules.deadline and (gone or self.late)

    def reads_wrong(self, state, place, work):
        wrong = False
        for peer, chunk, version in work.reads:
            there = self.life_of(state, peer).versions[state[peer].done][chunk]
            wrong = wrong or there != version or state[peer].tainted
        return wrong and place.failed is None

    def check(self, state, rank):
        """A rank that uses its buffer has read what it must, unless it knows that it has failed."""
        place, life = state[rank], self.life_of(state, rank)
        if place.done < len(life.events) and isinstance(life.events[place.done], Used):
            assert not place.tainted, f"rank {rank} uses what was not there: {state}"

    def check_end(self, state):
        """Once nothing more can happen, all ranks that live have come to their end."""
        for rank, place in enumerate(state):
            assert place.dead or place.done == len(self.life_of(state, rank).events), f"rank {rank} waits: {state}"

    def explore(self):
        """Return how many states can be reached; raise `AssertionError` where a promise is broken."""
        first = tuple(Place() for _ in self.programs)
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            following = list(self.successors(state))
            if not following:
                self.check_end(state)
            for rank, place in following:
                after = (*state[:rank], place, *state[rank + 1 :])
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
                    self.check(after, rank)
        return len(seen)


def step_of(*transfers):
    """A step that copies whole buffers of one chunk."""
    return Step.of([src for src, _ in transfers], [dst for _, dst in transfers], 0, 1, COPY)


def rotated(ranks):
    """All ranks overwrite what they send, twice."""
    turn = step_of(*((rank, (rank + 1) % ranks) for rank in range(ranks)))
    return Schedule("rotated", ranks, 1, lambda: iter([turn, turn]))


IDLE = Schedule("idle hops", 3, 1, lambda: iter([step_of((0, 1)), step_of((1, 2)), step_of((0, 1)), step_of((2, 0))]))
SCHEDULES = [
    direct.all_reduce(2),
    ring.all_reduce(2),
    halving_doubling.all_reduce(2),
    gossip.hypercube(2, 0),
    rotated(2),
    direct.broadcast(2),
    direct.all_reduce(3),
    ring.all_reduce(3),
    halving_doubling.all_reduce(3),
    double_tree.all_reduce(3, 1),
    torus.all_reduce(3, 1),
    gossip.dissemination(3, 0),
    rotated(3),
    chain.broadcast(3, slices=2),
    IDLE,
]
PAIRS = [schedule for schedule in SCHEDULES if schedule.ranks == 2]
TRIPLES = [direct.all_reduce(3), halving_doubling.all_reduce(3), gossip.dissemination(3, 0), rotated(3), IDLE]


def named(value):
    return f"{value.name}, {value.ranks} ranks" if isinstance(value, Schedule) else None


@pytest.mark.parametrize("schedule", SCHEDULES, ids=named)
def test_in_all_orders_of_events_ranks_read_what_they_must_and_come_to_their_end(schedule):
    assert Model(schedule, runs=3 if schedule.ranks == 2 else 2).explore() > 10


@pytest.mark.parametrize("schedule", [direct.all_reduce(2), ring.all_reduce(3)], ids=named)
def test_positions_may_wrap(schedule):
    model = Model(schedule, start=NEAR_WRAP)
    assert model.explore() > 50
    assert model.lives[0].told[-1][1] < NEAR_WRAP


@pytest.mark.parametrize("schedule", PAIRS, ids=named)
def test_two_ranks_of_which_any_may_be_late_or_die_use_nothing_wrong_and_come_to_their_end(schedule):
    assert Model(schedule, start=NEAR_WRAP, late=True, deaths=1).explore() > 100


@pytest.mark.parametrize("schedule", TRIPLES, ids=named)
def test_three_ranks_of_which_any_may_be_late_use_nothing_wrong_and_come_to_their_end(schedule):
    assert Model(schedule, runs=1, late=True).explore() > 100


@pytest.mark.parametrize("schedule", TRIPLES, ids=named)
def test_when_one_of_three_ranks_dies_the_others_use_nothing_wrong_and_come_to_their_end(schedule):
    assert Model(schedule, runs=1, deaths=1).explore() > 100


def kept(plan, keep):
    """A plan whose meetings need what ``keep(need)``."""

    def less(meeting):
        return meeting and meeting._replace(needs={peer: need for peer, need in meeting.needs.items() if keep(need)})

    return replace(
        plan,
        before=tuple(map(less, plan.before)),
        within=tuple(map(less, plan.within)),
        end=less(plan.end),
    )


def without_data(*args):
    """Reads before the peer has said that it is ready: that is the odd positions."""
    return kept(meetings(*args), lambda need: need % 2 == 0)


def without_reads(*args):
    """Overwrites before the peer has said that it has read."""
    return kept(meetings(*args), lambda need: need % 2)


def without_within(*args):
    plan = meetings(*args)
    return replace(plan, within=(None,) * len(plan.within))


def without_an_end(*args):
    plan = meetings(*args)
    return replace(plan, end=plan.end._replace(needs={}))


def told_late(*args):
    """Tells at the second meeting of a hop what the first one should have told."""
    plan = meetings(*args)
    return replace(plan, before=tuple(each and each._replace(position=each.position - 1) for each in plan.before))


MUTANTS = {
    "a peer's memory is read before its word": Model(direct.all_reduce(2), rules=Rules(plan=without_data)),
    "memory is overwritten before it was read": Model(ring.all_reduce(3), rules=Rules(plan=without_reads)),
    "what is sent is overwritten in the same hop": Model(rotated(2), rules=Rules(plan=without_within)),
    "the next run overwrites what is read": Model(direct.broadcast(2), rules=Rules(plan=without_an_end)),
    "a rank waits for what is told later": Model(direct.all_reduce(2), rules=Rules(plan=told_late)),
    "a graph tells old positions": Model(direct.all_reduce(2), rules=Rules(count=host_count)),
    "a position must be met exactly": Model(IDLE, rules=Rules(reached=lambda told, goal: told == goal)),
    "positions do not wrap": Model(direct.all_reduce(2), 2, NEAR_WRAP, Rules(reached=lambda told, goal: told >= goal)),
    "nothing ends a wait": Model(direct.all_reduce(2), rules=Rules(deadline=False), deaths=1),
    "a failed rank takes nothing back": Model(direct.broadcast(2), rules=Rules(takes_back=False), late=True),
    "nobody looks whether a peer has failed": Model(direct.broadcast(2), rules=Rules(looks=False), late=True),
}


@pytest.mark.parametrize("model", MUTANTS.values(), ids=MUTANTS)
def test_shortcuts_are_refuted(model):
    with pytest.raises(AssertionError, match=r"rank \d (uses|waits)"):
        model.explore()
