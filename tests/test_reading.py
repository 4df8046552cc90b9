# SPDX-License-Identifier: Apache-2.0
"""Programs that read peers' memory, step by step in random orders: random schedules, buffers, ranks that give up.

All ranks run on one thread. A step is one look at a peer's word, one write to it, or one kernel.
"""

from random import Random
from typing import NamedTuple

import numpy as np
import torch
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import moved_clock
from peer_group import connect_one, on_threads
from peer_memory import HostIpcMemory, signal_wait
from torch.distributed import HashStore

from commrt.kernels.plain_torch import mix_into
from commrt.kernels.signal_wait import ABORT
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
    made = [step_of(received) for received in steps]
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


class SteppedMemory(HostIpcMemory):
    """Notes plans in place of running them."""

    def __init__(self):
        super().__init__()
        self.plans = []

    def signal_wait(self, plan):
        return lambda: self.plans.append(plan)


class Run(NamedTuple):
    """A program of all ranks, on buffers of a name with these values."""

    name: str
    schedule: Schedule
    values: list


class Device:
    """What a rank's host has queued, all at once: so kernels go on after a wait has failed."""

    def __init__(self, store, size, rank, runs):
        """Collective."""
        self.rank, self.runs, self.memory, self.found, self.kept = rank, runs, SteppedMemory(), [], []
        self.transport = connect_one(store, rank, range(size), 60.0, self.memory)
        for peer, count in self.transport._signals._begins.items():
            count.fill_(NEAR_WRAP)
            self.transport._mapped.inbox(peer).fill_(NEAR_WRAP)
        self.buffers = {name: self.transport.allocate_shared(NUMEL, torch.int32) for name in "ab"}
        self.windows = dict(zip("ab", self.transport.share([*self.buffers.values()]), strict=True))
        self.steps = self.all_steps([self.queued(run) for run in runs])

    def queued(self, run):
        """Return the wait and the kernels of each hop, which the host queues in a run."""
        mine = program(run.schedule, self.rank)
        bound = bind_reading(mine, self.buffers[run.name], self.windows[run.name], self.transport)
        for hop in bound.hops:
            hop.exchange(Tag(0, run.name))
        self.kept.append(bound)
        return [(self.memory.plans.pop(0), hop.combinations) for hop in bound.hops]

    def all_steps(self, queued):
        """Yield after each step, True while it waits for a peer."""
        for run, hops in zip(self.runs, queued, strict=True):
            self.buffers[run.name].copy_(run.values[self.rank])
            yield False
            for plan, kernels in hops:
                yield from signal_wait(plan)
                for kernel in kernels:
                    kernel()
                    yield False
            if not self.transport._signals._state[0].item():
                self.found.append(self.buffers[run.name].clone())


class Trouble(NamedTuple):
    """After how many steps of all ranks a rank gives up or dies."""

    rank: int
    after: int
    dies: bool


def go(devices, random, trouble):
    """Run all in a random order; the clock moves past all deadlines when only a rank in trouble could go on."""
    alive, steps, waited = dict(enumerate(devices)), 0, 0
    with moved_clock() as clock:
        while alive:
            rank = random.choice(list(alive))
            waits = advance(alive[rank].steps, random.choice([1, 1, 2, 30]))
            steps, waited = steps + 1, waited + 1 if waits else 0
            if trouble and trouble.after == steps and trouble.rank in alive:
                if trouble.dies:
                    alive.pop(trouble.rank)
                else:  # as when another thread calls abort()
                    alive[trouble.rank].transport._signals._words[ABORT] = 1
            if waits is None:
                alive.pop(rank, None)
            if waited > PATIENCE:
                assert trouble, "all ranks wait"
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


def ran(case, trouble=None):
    """(found, expected) of each rank: what it found at the end of each run, up to its failure."""
    size, runs, seed = case
    store = HashStore()
    devices = on_threads(size, lambda rank: Device(store, size, rank, runs))
    try:
        go(devices, Random(seed), trouble)
    finally:
        for device in devices:
            device.transport.abort()
    expected = [result(run.schedule, [value.clone() for value in run.values]) for run in runs]
    return [(device.found, [after[rank] for after in expected]) for rank, device in enumerate(devices)]


@cases(60)
@given(cases_of_ranks())
def test_random_programs_in_random_orders_of_steps_do_what_their_schedules_mean(case):
    for found, expected in ran(case):
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)


@cases(60)
@given(cases_of_ranks(), st.integers(0, 1), st.integers(0, 120), st.booleans())
def test_if_a_rank_gives_up_or_dies_at_any_step_no_other_takes_a_wrong_result_for_right(case, who, after, dies):
    for found, expected in ran(case, Trouble(rank=who, after=after, dies=dies)):
        assert all(map(torch.equal, found, expected))
