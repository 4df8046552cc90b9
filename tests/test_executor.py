# SPDX-License-Identifier: Apache-2.0
"""A program on a buffer does what its schedule says, whatever the sizes; it is bound once, and goes with the buffer."""

import gc
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from cases import on_ranks
from combining_races import TwoStreams, run_noted
from local_loops import ends_equal

import commrt
from commrt.algorithms import ring
from commrt.algorithms.sliced import Sliced, in_slices
from commrt.errors import TransportClosed
from commrt.program import program
from commrt.proof.spec import all_reduce
from commrt.runtime import prepared
from commrt.runtime.executor import bind
from commrt.runtime.prepared_runs import PreparedRuns
from commrt.schedule import ADD, COPY, Schedule, Step
from commrt.testing.ranks import run_ranks
from commrt.transport.local import Fabric, LocalTransport
from commrt.transport.protocol import Tag


def test_additions_to_overlapping_ranges_happen_range_by_range():
    step = Step.of([1, 2, 3], 0, [0, 1, 0], [2, 3, 2], ADD)
    schedule = Schedule("overlapping", 4, 3, lambda: iter([step]))

    def body(world):
        buffer = torch.full((24,), [0.0, 1e8, 1.0, -1e8][world.rank])
        world.run(schedule, buffer)
        return buffer

    chunk = run_ranks(4, body)[0][8:16]
    in_order = (torch.tensor(0.0) + 1e8 - 1e8) + 1.0
    assert torch.equal(chunk, in_order.expand(8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.complex64], ids=str)
def test_a_star_adds_all_that_arrives_at_once_without_losing_bits(dtype):
    gather, spread = Step.of([1, 2, 3], 0, 0, 1, ADD), Step.of(0, [1, 2, 3], 0, 1, COPY)
    star = Schedule("star", 4, 1, lambda: iter([gather, spread]))
    commrt.prove(star, all_reduce(4, 1))
    value = 2**20 + 1j if dtype.is_complex else 2**24 + 1

    def body(world):
        buffer = torch.full((5,), value, dtype=dtype)
        world.run(star, buffer)
        return buffer

    assert all(buffer.tolist() == [4 * value] * 5 for buffer in run_ranks(4, body))


@pytest.mark.parametrize(
    ("hop", "reads"),
    [
        ([(0, 1, 0, ADD), (1, 0, 1, ADD)], True),
        ([(0, 1, 0, ADD), (1, 0, 0, ADD)], False),  # the peer reads what this rank would change
        ([(0, 1, 0, ADD), (1, 0, 1, COPY)], False),
        ([(0, 1, 0, ADD), (1, 0, 1, ADD), (1, 0, 2, COPY)], False),
        ([(1, 0, 1, ADD), (1, 0, 2, ADD)], True),
    ],
)
def test_a_rank_only_reads_what_it_adds_to_chunks_that_it_does_not_send(hop, reads):
    step = Step.of(*map(list, zip(*[(src, dst, lo, lo + 1) for src, dst, lo, _ in hop], strict=True)), COPY)
    step = replace(step, combine=[combine for *_, combine in hop])
    groups = []

    class Recorded(LocalTransport):
        def bind(self, group):
            groups.append(group)
            return super().bind(group)

    bind(program(Schedule("a hop", 2, 4, lambda: iter([step])), 0), torch.zeros(64), Recorded(Fabric(2), 0))
    assert [group.reads for group in groups] == [reads]


# Slices: what arrived in one hop may be combined beside the next exchange, never while either touches the other's
# memory. `dev/combining_races.py` searches for such accesses, and `test_prove` runs it over schedules.


def test_slices_are_combined_beside_the_next_exchange_and_a_whole_ring_is_not():
    streams = TwoStreams()
    assert run_noted(in_slices(ring.all_reduce(4), 2), 0, streams).streams is streams
    assert run_noted(ring.all_reduce(4), 0, streams).streams is None


def test_what_comes_after_the_program_waits_for_its_last_combination():
    streams = TwoStreams()
    run_noted(in_slices(ring.reduce_scatter(4), 2), 0, streams)
    assert streams.clocks[0][1] == streams.clocks[1][1] == 6


@ends_equal(3)
def test_training_in_slices_ends_with_equal_replicas(world):
    model = torch.nn.Linear(40, 30)
    replica = commrt.attach(model, algorithm=Sliced(commrt.Ring(), 2), world=world)
    model(torch.randn(3, 40)).sum().backward()
    assert replica.replicas_equal()
    return model.weight.grad


# `World.run` binds a schedule to a buffer once, and lets go of it with the buffer.

RING = commrt.Ring().schedule(0, 2)
NOW = Tag(0, 0)
LIMIT_S = 20.0


@pytest.fixture
def world():
    return SimpleNamespace(membership=SimpleNamespace(number=0, ranks=(0, 1)))


@pytest.fixture
def compared():
    """What was compared with other ranks, in order."""
    return []


@pytest.fixture
def runs(world, compared):
    """Over a transport that moves nothing."""
    nowhere = SimpleNamespace(rank=0, ranks=2, bind=lambda group: lambda tag: None)
    return PreparedRuns(nowhere, world, lambda claim, *_: compared.append(claim))


def test_of_many_exchanges_only_the_latest_are_kept(world):
    made = prepared.Prepared(world, kept=2)
    some = [commrt.Ring().schedule(0, ranks) for ranks in (2, 3, 4)]
    for schedule in some:
        made.keep(object(), schedule)
    assert [made.known(schedule) is not None for schedule in some] == [False, True, True]


CHANGES = {
    "it lies elsewhere": lambda buffer: buffer.set_(torch.zeros(10)),
    "another dtype": lambda buffer: setattr(buffer, "data", buffer.data.view(torch.int32)),
    "it is shorter": lambda buffer: buffer.resize_(4),
}
ONE = 1065353216
"""The float 1 has the bits of this integer; sums of the two differ."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@on_ranks(2)
def test_a_buffer_that_has_changed_is_bound_anew(world, change):
    buffer = torch.ones(10)
    world.run(RING, buffer)
    change(buffer)
    world.run(RING, buffer.fill_(ONE))
    assert buffer.tolist() == [2 * ONE] * len(buffer)
    assert buffer.as_strided((10,), (1,))[len(buffer) :].tolist() in ([], [2.0] * 6)


@pytest.mark.parametrize("inference", [False, True])
@on_ranks(2)
def test_autograd_learns_that_a_bound_buffer_was_written(world, inference):
    buffer = torch.ones(10)
    world.run(RING, buffer)
    before = buffer._version
    with torch.inference_mode(inference):
        world.run(RING, buffer)
    assert (buffer._version > before, buffer.tolist()) == (True, [4.0] * 10)


def test_a_bound_buffer_may_run_in_the_background():
    def run(world):
        buffer = torch.ones(10)
        world.run(RING, buffer)
        if world.rank == 0:
            work = world.run(RING, buffer, async_op=True)
            begun.set()
            work.wait()
        else:
            assert begun.wait(LIMIT_S)
            world.run(RING, buffer)
        return buffer.tolist()

    begun = Event()
    assert run_ranks(2, run) == [[4.0] * 10] * 2


@on_ranks(2)
def test_a_bound_buffer_is_refused_once_it_has_another_shape(world):
    buffer = torch.ones(10)
    world.run(RING, buffer)
    buffer.unsqueeze_(0)
    with pytest.raises(commrt.UsageError, match="flatten it first"):
        world.run(RING, buffer)
    world.run(RING, buffer.squeeze_(0))
    assert buffer.tolist() == [4.0] * 10


@on_ranks(2)
def test_what_is_bound_is_refused_inside_join_and_after_close(world):
    buffer = torch.ones(10)
    world.run(RING, buffer)
    world.joined = object()
    with pytest.raises(commrt.UsageError, match="inside join"):
        world.run(RING, buffer)
    world.joined = None
    world.close()
    with pytest.raises(TransportClosed, match="was closed"):
        world.run(RING, buffer)


def test_what_was_bound_in_another_generation_is_bound_anew(runs, world):
    buffer = torch.zeros(10)
    runs.run(RING, buffer, NOW)
    before = runs.known(RING, buffer)
    world.membership.number = 1
    assert runs.known(RING, buffer) is None
    runs.run(RING, buffer, NOW)
    assert runs.known(RING, buffer) not in (None, before)


def test_a_buffer_that_dies_takes_its_own_programs_only(runs):
    one, other = torch.zeros(10), torch.zeros(10)
    schedules = RING, commrt.HalvingDoubling().schedule(0, 2)
    for buffer in (one, other):
        for schedule in schedules:
            runs.run(schedule, buffer, NOW)
    bound = ref(runs.known(RING, one).group.sends[0].data)
    del one, buffer
    gc.collect()
    assert bound() is None
    assert all(runs.known(schedule, other) is not None for schedule in schedules)


def test_a_rank_that_has_another_object_or_has_let_go_of_one_compares_nothing_again(runs, compared):
    for schedule in (RING, RING.over((0, 1)), RING):
        runs.run(schedule, torch.zeros(8), NOW)
    assert len(compared) == 1
    for other in (torch.zeros(9), torch.zeros(8, dtype=torch.int64)):
        runs.run(RING, other, NOW)
    assert len(compared) == 3


def test_what_is_forgotten_as_compared_is_forgotten_as_bound(runs, compared, monkeypatch):
    monkeypatch.setattr(prepared, "COMPARISONS_KEPT", 1)
    here, there = torch.zeros(8), torch.zeros(9)
    for buffer in (here, there, here):
        runs.run(RING, buffer, NOW)
    assert len(compared) == 3
