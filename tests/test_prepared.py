# SPDX-License-Identifier: Apache-2.0
"""`World.run` binds a schedule to a buffer once, and lets go of it with the buffer."""

from __future__ import annotations

import gc
from threading import Event
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from cases import on_ranks

import commrt
from commrt.errors import TransportClosed
from commrt.runtime import prepared
from commrt.runtime.prepared import PreparedRuns
from commrt.testing.ranks import run_ranks
from commrt.transport.protocol import Tag

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
