# SPDX-License-Identifier: Apache-2.0
"""The signals and waits of ranks that read each other's memory, in all orders of events of small groups.

What a rank has signalled and written follows from how far it is in its own program: a state is a place for each rank.
A kernel is one event: no kernel waits, so two kernels that nothing orders occur in both orders, and one of them reads
a wrong version.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest

from commrt.algorithms import chain, direct, double_tree, gossip, halving_doubling, ring, torus
from commrt.kernels.signal_wait import BACK
from commrt.program import program
from commrt.schedule import COPY, Schedule, Step
from commrt.signal_waits import signal_waits

WRAP = 1 << 32
NEAR_WRAP = WRAP - 3
"""Where positions begin to count: they wrap in the first run."""


class Signal(NamedTuple):
    peer: int
    position: int


class Wait(NamedTuple):
    peer: int
    goal: int


class Look(NamedTuple):
    """Fail if a peer has taken back what it signalled."""

    peer: int
    begin: int


class Work(NamedTuple):
    """A kernel, or the caller who fills the buffer: what it reads as (peer, chunk, right version), and chunks."""

    reads: tuple
    writes: tuple


class Used(NamedTuple):
    """The rank takes what is in its buffer."""


def difference(one, other):
    return (one - other + WRAP // 2) % WRAP - WRAP // 2


class Place(NamedTuple):
    done: int = 0
    """Events."""
    failed: int | None = None
    """After how many events it waited in vain; then it does the events of `Model.rest`."""
    tainted: bool = False
    """It has read what it must not, and does not know."""
    dead: bool = False


@dataclass(eq=False)
class Model:
    """Ranks that run a schedule again and again on one buffer, which each fills before a run."""

    schedule: Schedule
    runs: int = 2
    late: bool = False
    """Any wait may end by its deadline."""
    deaths: int = 0

    def __post_init__(self):
        self.programs = [program(self.schedule, rank) for rank in range(self.schedule.ranks)]
        self.written = [self.versions_before(mine) for mine in self.programs]
        self.events = cache(lambda rank, failed: [*(self.life(rank) if failed is None else self.rest(rank, failed))])
        self.facts = cache(self.facts)

    def versions_before(self, mine):
        """[hops + 1] by chunk, how often a rank has written it before a hop of a run; filling it counts."""
        rows = [np.ones(mine.chunks, dtype=int)]
        for hop in mine.hops:
            rows.append(rows[-1].copy())
            for each in hop.recvs:
                rows[-1][each.lo : each.hi] += 1
        return rows

    def life(self, rank):
        mine = self.programs[rank]
        plan, fill = signal_waits(mine.hops, mine.chunks, mine.peers), Work((), tuple(range(mine.chunks)))
        for run in range(self.runs):
            begin = NEAR_WRAP + run * (2 * len(mine.hops) + 1)
            wait = partial(self.events_of, sorted(mine.peers), begin)
            yield fill
            for number, hop in enumerate(mine.hops):
                if plan.before[number] is not None:
                    yield from wait(plan.before[number])
                    yield from self.kernels(run, number, hop, plan.within[number], wait)
            yield from wait(plan.end)
            yield Used()
        yield fill

    def events_of(self, peers, begin, signal_wait):
        yield from (Look(peer, begin % WRAP) for peer in peers)
        yield from (Signal(peer, (begin + signal_wait.position) % WRAP) for peer in peers)
        yield from (Wait(peer, (begin + need) % WRAP) for peer in peers if (need := signal_wait.needs.get(peer, 0)))

    def kernels(self, run, number, hop, within, wait):
        read = [tuple(self.sources(run, number, each)) for each in hop.recvs]
        write = [tuple(range(each.lo, each.hi)) for each in hop.recvs]
        if within is None:
            yield from map(Work, read, write)
        else:
            yield from (Work(reads, ()) for reads in read)
            yield from wait(within)
            yield from (Work((), writes) for writes in write)

    def sources(self, run, number, transfer):
        rows = self.written[transfer.peer]
        for chunk in range(transfer.lo, transfer.hi):
            yield transfer.peer, chunk, run * int(rows[-1][chunk]) + int(rows[number][chunk])

    def rest(self, rank, failed):
        """What a rank does after it has waited in vain: all its kernels, and no waits.

        They count as one kernel, as none of them orders anything, and a chunk that is wrong stays wrong.
        """
        signalled, _ = self.facts(rank, None, failed)
        yield from (Signal(peer, (position - BACK) % WRAP) for peer, position in signalled.items())
        left = [event for event in self.events(rank, None)[failed:] if isinstance(event, Work)]
        yield Work((), tuple({chunk for kernel in left for chunk in kernel.writes}))

    def facts(self, rank, failed, done):
        """What a rank has signalled, by peer, and how often it has written each chunk."""
        if not done and failed is None:
            return dict.fromkeys(self.programs[rank].peers, NEAR_WRAP), (0,) * self.schedule.chunks
        if not done:
            return self.facts(rank, None, failed)
        signalled, versions = self.facts(rank, failed, done - 1)
        match self.events(rank, failed)[done - 1]:
            case Signal(peer, position):
                signalled = signalled | {peer: position}
            case Work(_, writes):
                versions = tuple(version + (chunk in writes) for chunk, version in enumerate(versions))
        return signalled, versions

    def facts_in(self, state, rank):
        return self.facts(rank, state[rank].failed, state[rank].done)

    def event(self, state, rank):
        """What a rank does next; None at its end."""
        events, done = self.events(rank, state[rank].failed), state[rank].done
        return events[done] if done < len(events) else None

    def successors(self, state):
        """What may happen next, as (rank, place)."""
        for rank, place in enumerate(state):
            event, goes_on, waits = self.event(state, rank), place._replace(done=place.done + 1), False
            if place.dead or event is None:
                continue
            match event:
                case Look(peer, begin):
                    if difference(self.facts_in(state, peer)[0][rank], begin) < -BACK // 2:
                        yield rank, Place(0, place.done)
                        continue
                case Wait(peer, goal):
                    waits = difference(self.facts_in(state, peer)[0][rank], goal) < 0
                    if self.may_be_late(state):
                        yield rank, Place(0, place.done)
                case Work(reads, _):
                    goes_on = goes_on._replace(tainted=place.tainted or self.reads_wrong(state, place, reads))
            if not waits:
                yield rank, goes_on
            if sum(each.dead for each in state) < self.deaths:
                yield rank, place._replace(dead=True)

    def may_be_late(self, state):
        """A deadline ends waits for a rank that has failed or died; any wait if some may be `late`."""
        gone = any(place.dead or place.failed is not None for place in state)
        return gone or self.late

    def reads_wrong(self, state, place, reads):
        return place.failed is None and any(
            state[peer].tainted or self.facts_in(state, peer)[1][chunk] != version for peer, chunk, version in reads
        )

    def explore(self):
        """Return how many states can be reached; raise `AssertionError` where a promise is broken."""
        first = (Place(),) * len(self.programs)
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            following = list(self.successors(state))
            for rank, place in enumerate(state):
                is_wrong = place.tainted and isinstance(self.event(state, rank), Used)
                assert not is_wrong, f"rank {rank} uses what was not there: {state}"
                is_stuck = not (following or place.dead or self.event(state, rank) is None)
                assert not is_stuck, f"rank {rank} waits: {state}"
            for rank, place in following:
                after = (*state[:rank], place, *state[rank + 1 :])
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)


def step_of(*transfers):
    """A step that copies whole buffers of one chunk."""
    return Step.of([src for src, _ in transfers], [dst for _, dst in transfers], 0, 1, COPY)


def rotated(ranks):
    """All ranks overwrite what they send, twice."""
    turn = step_of(*((rank, (rank + 1) % ranks) for rank in range(ranks)))
    return Schedule("rotated", ranks, 1, lambda: iter([turn, turn]))


IDLE = Schedule("idle hops", 3, 1, lambda: iter([step_of((0, 1)), step_of((1, 2)), step_of((0, 1)), step_of((2, 0))]))
PAIRS = [
    direct.all_reduce(2),
    ring.all_reduce(2),
    halving_doubling.all_reduce(2),
    gossip.hypercube(2, 0),
    rotated(2),
    direct.broadcast(2),
]
TRIPLES = [direct.all_reduce(3), halving_doubling.all_reduce(3), rotated(3), IDLE]
MORE = [
    gossip.dissemination(3, 0),
    ring.all_reduce(3),
    double_tree.all_reduce(3, 1),
    torus.all_reduce(3, 1),
    chain.broadcast(3, slices=2),
]


def named(value):
    return f"{value.name}, {value.ranks} ranks" if isinstance(value, Schedule) else None


@pytest.mark.parametrize("schedule", [*PAIRS, *TRIPLES, *MORE], ids=named)
def test_all_ranks_read_what_they_must_and_come_to_their_end(schedule):
    assert Model(schedule, runs=3 if schedule.ranks == 2 else 2).explore() > 10


@pytest.mark.parametrize("schedule", PAIRS, ids=named)
def test_two_ranks_of_which_any_may_be_late_or_die_use_nothing_wrong_and_come_to_their_end(schedule):
    assert Model(schedule, late=True, deaths=1).explore() > 100


@pytest.mark.parametrize("trouble", [{"late": True}, {"deaths": 1}], ids=["late", "dead"])
@pytest.mark.parametrize("schedule", TRIPLES, ids=named)
def test_three_ranks_of_which_any_may_be_late_or_one_die_use_nothing_wrong_and_come_to_their_end(schedule, trouble):
    assert Model(schedule, runs=1, **trouble).explore() > 100
