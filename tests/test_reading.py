# SPDX-License-Identifier: Apache-2.0
"""Programs that read peers' memory, step by step in random orders: random schedules, buffers, ranks that give up.

All ranks run on one thread. A step is one look at a peer's word, one write to it, or one kernel.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import moved_clock
from peer_group import connect_one
from peer_memory import HostPeerMemory, meeting
from torch.distributed import HashStore

from commrt.kernels.meeting import ABORT
from commrt.kernels.plain_torch import mix_into
from commrt.program import chunk_bounds, program
from commrt.runtime.reading import bind_reading
from commrt.schedule import ADD, COPY, MIX, Schedule, Step
from commrt.transport.protocol import Tag

GRANULE = 16
NUMEL = 5 * GRANULE + 3
NEAR_WRAP = -3
PATIENCE = 300
"""Steps without progress after which the clock moves past all deadlines."""


@st.composite
def schedules(draw, ranks):
    """Any valid steps: in each, a rank copies, adds up, or mixes some of its chunks, or none."""
    chunks, numbers = draw(st.integers(1, 3)), st.integers(0, ranks - 1)
    steps = draw(
        st.lists(st.dictionaries(st.tuples(numbers, st.integers(0, chunks - 1)), sources(numbers)), max_size=4)
    )
    made = [step for received in steps for step in [step_of(received)]]
    return Schedule("random", ranks, chunks, lambda: iter(made))


def sources(numbers):
    """(combine, senders) of one chunk of a rank."""
    one = st.tuples(st.sampled_from([COPY, MIX]), st.sets(numbers, min_size=1, max_size=1))
    return one | st.tuples(st.just(ADD), st.sets(numbers, min_size=1))


def step_of(received):
    rows = [
        (sender, rank, chunk, chunk + 1, int(combine), 0.25)
        for (rank, chunk), (combine, senders) in received.items()
        for sender in sorted(senders - {rank})
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)] if rows else [[]] * 6
    return Step(*columns)


def result(schedule, buffers):
    """What a schedule leaves on each rank, from its meaning: each transfer reads the state before its step."""
    bounds = chunk_bounds(len(buffers[0]), schedule.chunks, GRANULE)
    for step in schedule.steps():
        before = [buffer.clone() for buffer in buffers]
        for src, dst, lo, hi, combine, weight in zip(*step.canonical().columns, strict=True):
            span = slice(bounds[lo], bounds[hi])
            own, there = buffers[dst][span], before[src][span]
            if combine == COPY:
                own.copy_(there)
            elif combine == ADD:
                own.add_(there)
            else:
                mix_into(own, there, float(weight))
    return buffers


class SteppedMemory(HostPeerMemory):
    """Notes meetings in place of making them."""

    def __init__(self):
        super().__init__()
        self.plans = []

    def meet(self, plan):
        return lambda: self.plans.append(plan)


@dataclass
class Ranks:
    """All ranks of a host, with a buffer for each name."""

    size: int
    numel: int
    memories: list = field(init=False)
    transports: list = field(init=False)
    buffers: dict = field(default_factory=dict)
    windows: dict = field(default_factory=dict)
    kept: list = field(default_factory=list)

    def __post_init__(self):
        self.memories, store = [SteppedMemory() for _ in range(self.size)], HashStore()
        self.pool = ThreadPoolExecutor(self.size)
        members = range(self.size)
        self.transports = list(
            self.pool.map(lambda rank: connect_one(store, rank, members, 60.0, self.memories[rank]), members)
        )
        for transport in self.transports:
            for peer, count in transport._begins.items():
                count.fill_(NEAR_WRAP)
                transport._neighbours.inbox(peer).fill_(NEAR_WRAP)

    def share(self, name):
        """Let all read a new buffer of each rank."""
        self.buffers[name] = [transport.allocate_shared(self.numel, torch.int32) for transport in self.transports]
        shared = self.pool.map(lambda rank: self.transports[rank].share([self.buffers[name][rank]]), range(self.size))
        self.windows[name] = [windows[0] for windows in shared]

    def bound(self, schedule, name, rank):
        mine, transport = program(schedule, rank), self.transports[rank]
        return bind_reading(mine, self.buffers[name][rank], self.windows[name][rank], transport)

    def queued(self, run, rank):
        """Yield what the host of a rank queues in a run."""
        schedule, memory = run.schedule, self.memories[rank]
        bound = self.bound(schedule, run.name, rank)
        for hop in bound.hops:
            hop.exchange(Tag(0, run.name))
        self.kept.append(bound)
        hops = [(memory.plans.pop(0), hop.combinations) for hop in bound.hops]
        yield from (self.buffers[run.name][rank], run.values[rank], hops)

    def close(self):
        self.pool.shutdown()
        for transport in self.transports:
            transport.abort()


class Run(NamedTuple):
    """A program of all ranks, on buffers with these values."""

    name: str
    schedule: Schedule
    values: list


class Device:
    """What a rank's host has queued, all at once: so kernels go on after a meeting has failed."""

    def __init__(self, ranks, rank, runs):
        self.transport, self.found = ranks.transports[rank], []
        queued = [list(ranks.queued(run, rank)) for run in runs]
        self.steps = self.all_steps(queued)

    def all_steps(self, queued):
        """Yield after each step, True while it waits for a peer."""
        for buffer, values, hops in queued:
            buffer.copy_(values)
            yield False
            for plan, kernels in hops:
                yield from meeting(plan)
                for kernel in kernels:
                    kernel()
                    yield False
            if not self.transport._state[0].item():
                self.found.append(buffer.clone())

    def give_up(self):
        """As when another thread calls abort()."""
        self.transport._words[ABORT] = 1


class Trouble(NamedTuple):
    """After how many steps of all ranks a rank gives up or dies."""

    rank: int
    after: int
    dies: bool


def go(devices, random, troubles=()):
    """Run all in a random order; the clock moves past all deadlines when only a rank in trouble could go on."""
    alive, steps, waited = dict(enumerate(devices)), 0, 0
    with moved_clock() as clock:
        while alive:
            rank = random.choice(list(alive))
            waits = advance(alive[rank].steps, random.choice([1, 1, 2, 30]))
            steps, waited = steps + 1, waited + 1 if waits else 0
            for trouble in [trouble for trouble in troubles if trouble.after == steps and trouble.rank in alive]:
                alive.pop(trouble.rank) if trouble.dies else alive[trouble.rank].give_up()
            if waits is None:
                alive.pop(rank, None)
            if waited > PATIENCE:
                assert troubles, "all ranks wait"
                clock.advance(1000.0)


def advance(steps, count):
    """Take at most so many steps; returns True if the last one waits, None at the end."""
    for _ in range(count):
        waits = next(steps, None)
        if waits is not False:
            return waits
    return False


@st.composite
def cases_of_ranks(draw):
    """(ranks, runs), each of them one of two programs on one of two buffers."""
    size = draw(st.integers(2, 5))
    several = [draw(schedules(size)), draw(schedules(size))]
    places = draw(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(several)), min_size=1, max_size=3))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)

    def values():
        return torch.randint(-1000, 1000, (NUMEL,), generator=generator, dtype=torch.int32)

    runs = [Run(name, schedule, [values() for _ in range(size)]) for name, schedule in places]
    return size, runs, seed


def ran(case, troubles=()):
    """What each rank found at the end of each run, up to its failure; and what it should have found."""
    size, runs, seed = case
    ranks = Ranks(size, NUMEL)
    try:
        for name in "ab":
            ranks.share(name)
        devices = [Device(ranks, rank, runs) for rank in range(size)]
        go(devices, Random(seed), troubles)
    finally:
        ranks.close()
    return devices, [result(run.schedule, [value.clone() for value in run.values]) for run in runs]


def stacked(tensors):
    return torch.stack(list(tensors)) if tensors else torch.empty(0)


@cases(60)
@given(cases_of_ranks())
def test_random_programs_in_random_orders_of_steps_do_what_their_schedules_mean(case):
    devices, expected = ran(case)
    for rank, device in enumerate(devices):
        assert torch.equal(stacked(device.found), stacked([after[rank] for after in expected]))


@cases(60)
@given(cases_of_ranks(), st.integers(0, 1), st.integers(0, 120), st.booleans())
def test_if_a_rank_gives_up_or_dies_at_any_step_no_other_takes_a_wrong_result_for_right(case, who, after, dies):
    devices, expected = ran(case, [Trouble(rank=who, after=after, dies=dies)])
    for rank, device in enumerate(devices):
        count = len(device.found)
        assert torch.equal(stacked(device.found), stacked([after[rank] for after in expected[:count]]))
