# SPDX-License-Identifier: Apache-2.0
"""world.run cuts a buffer into equal chunks, or refuses it where that matters: no part is where nobody expects it."""

import pytest
import torch
from cases import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.algorithms import ring
from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.errors import DisagreementError, UsageError
from commrt.kernels import dispatch
from commrt.proof import replay
from commrt.proof.replay import ends_alike
from commrt.proof.spec import ANYTHING, collective_of
from commrt.schedule import ADD, MIX, Schedule, Step
from commrt.testing.ranks import run_ranks

UNSET = -1
UNIFORM, DIVIDED = ("all_reduce", "broadcast"), ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
"""Collectives after which a rank has the same in all chunks, and those after which it has not."""


def values_of(rank, numel):
    return torch.arange(numel) + 1000 * rank


def ran(world, schedule, promise, numel):
    """Run `schedule` on its promise's inputs; return whether this rank ends with what it promises."""
    chunk = torch.arange(numel) * schedule.chunks // max(numel, 1)
    is_defined, goals = (torch.tensor(row[world.rank])[chunk] for row in (promise.defined, promise.goal))
    buffer = values_of(world.rank, numel).where(is_defined, UNSET)
    world.run(schedule, buffer)
    return all(
        torch.equal(
            buffer[goals == goal], sum(values_of(rank, numel) for rank in promise.families[goal])[goals == goal]
        )
        for goal in set(goals.tolist()) - {ANYTHING}
    )


def refused(world, schedule, numel):
    """Return whether `schedule` refuses so many elements, and leaves them as they were."""
    buffer = torch.arange(numel)
    need = -(-numel // schedule.chunks) * schedule.chunks
    with pytest.raises(UsageError, match=rf"{numel} elements do not divide into .* pad the buffer to {need} elements$"):
        world.run(schedule, buffer)
    return torch.equal(buffer, torch.arange(numel))


def is_right(world, collective, schedule, numel):
    if numel % schedule.chunks and not ends_alike(schedule):
        return refused(world, schedule, numel)
    return ran(world, schedule, collective_of(collective, schedule.ranks, schedule.chunks), numel)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(sorted({*COLLECTIVES} - {"barrier"})), st.integers(1, 17))
def test_every_schedule_is_right_or_refused(data, collective, ranks):
    schedule = data.draw(st.sampled_from([*candidates(collective, ranks).values()]), label="schedule")
    multiples = st.integers(0, 3).map(lambda size: size * schedule.chunks)
    numel = data.draw(multiples | st.integers(0, 300), label="numel")
    assert all(run_ranks(ranks, lambda world: is_right(world, collective, schedule, numel)))


def test_only_all_reduces_and_broadcasts_may_be_cut_anywhere():
    for collective in (*UNIFORM, *DIVIDED):
        schedules = [schedule for ranks in (2, 3, 4, 8, 9) for schedule in candidates(collective, ranks).values()]
        assert {ends_alike(each) for each in schedules} == {collective in UNIFORM}, collective


def test_a_schedule_that_mixes_or_adds_twice_may_not_be_cut_anywhere():
    mix = Schedule("mix", 2, 2, lambda: iter([Step.of([0, 1], [1, 0], 0, 2, MIX, 0.5)]))
    twice = Schedule("twice", 2, 2, lambda: iter([Step.of([0, 1], [1, 0], 0, 2, ADD)] * 2))
    assert not ends_alike(mix)
    assert not ends_alike(twice)


def test_chunks_are_replayed_in_blocks(monkeypatch):
    monkeypatch.setattr(replay, "BLOCK_BYTES", 1)
    assert ends_alike(ring.all_reduce(4))
    assert not ends_alike(ring.all_gather(4))


@on_ranks(4)
def test_ranks_that_come_with_other_sizes_learn_that_first(world):
    with pytest.raises(DisagreementError, match="about numel: 10 against 12"):
        world.run(ring.all_gather(4), torch.ones((12, 10)[world.rank == 1]))
    world.run(ring.all_gather(4), buffer := torch.ones(12))
    assert buffer.tolist() == [1.0] * 12


def test_on_a_gpu_a_chunk_between_two_aligned_addresses_is_added_by_plain_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "is_on_gpu", lambda tensor: True)
    room, received = torch.ones(64), torch.ones(64)
    own = room[5:10]
    assert dispatch.has_kernels(room[16:32])
    assert not dispatch.has_kernels(own)
    dispatch.adding(own, [own, received[:5]])()
    dispatch.mixing(own, received[:5], 0.5)()
    assert own.tolist() == [1.5] * 5
    assert room.sum() == 64 + 5 / 2
