# SPDX-License-Identifier: Apache-2.0
"""The ranks of a step run the same schedule, in every step."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np
import pytest
import torch
from cases import for_each, on_ranks
from torch import nn

import commrt
from commrt.algorithms import ring
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.algorithms.gossip import hypercube
from commrt.buckets.engine import KEPT
from commrt.errors import CommrtError, DisagreementError
from commrt.schedule import Schedule, Step
from commrt.testing.faults import delay_at, with_faults
from commrt.testing.ranks import over_threads, run_ranks
from commrt.transport.local import LocalTransport


@lru_cache
def relabelled(ranks, first, second):
    """A ring in which two chunks have changed places: all sizes are the same, and what they mean is not."""
    place = np.arange(ranks)
    place[[first, second]] = place[[second, first]]

    def steps():
        for step in ring.all_reduce(ranks).steps():
            src, dst, lo, _, combine, weight = step.columns
            yield Step(*[src, dst, place[lo], place[lo] + 1, combine, weight])

    return Schedule("ring", ranks, ranks, steps)


class Moody:
    """Looks the same on every rank, and runs what it was told from a step on."""

    def __init__(self, later, since=2):
        self._later, self._since = later, since

    def __repr__(self):
        return "Moody()"

    def schedule(self, step, ranks):
        return relabelled(ranks, *self._later) if step >= self._since else ring.all_reduce(ranks)


def train(world, algorithm, steps=4, model=None):
    torch.set_num_threads(1)
    model = model or nn.Linear(16, 8)
    commrt.attach(model, algorithm=algorithm, world=world)
    for _ in range(steps):
        model(torch.full((1, 16), 1.0 + world.rank)).sum().backward()
    return next(model.parameters()).grad.clone()


@on_ranks(4)
def test_ranks_whose_schedules_part_in_a_later_step_are_told_so(world):
    with pytest.raises(DisagreementError, match=r"step 2: rank 2 disagrees with rank 0 about schedule: \w+ against"):
        train(world, Moody((1, 2) if world.rank == 2 else (0, 1)))


@on_ranks(4, timeout_s=2.0)
def test_a_rank_that_alone_runs_another_schedule_ends_the_step_on_every_rank(world):
    with pytest.raises(CommrtError):
        train(world, Moody((1, 2), since=2 if world.rank == 2 else 100))
    assert world.closed


class Fickle:
    """Always the same movements; on rank 0 a new object each time."""

    def __init__(self, rank):
        self._rank = rank

    def __repr__(self):
        return "Fickle()"

    def schedule(self, step, ranks):
        ours = relabelled(ranks, 0, min(step, 1))
        return ours.named(f"{step}") if self._rank == 0 else ours


def test_a_comparison_is_due_by_what_moves_and_not_by_which_object_says_so():
    first, *others = run_ranks(3, lambda world: train(world, Fickle(world.rank), steps=KEPT + 3).tolist())
    assert all(other == first for other in others)


class Crossed(nn.Module):
    """Gradients become ready in another order than attach expects."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(8, 4), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(self.first(x))


@for_each(("buffers", "first"), [(0, 1), (1, 2)])
@on_ranks(2)
def test_later_steps_bind_nothing(world, buffers, first):
    model, bound, bind = Crossed(), [], world.transport.bind
    for number in range(buffers):
        model.register_buffer(f"statistics {number}", torch.zeros(2))
    replica = commrt.attach(model, world=world, bucket_cap_mb=1e-9)
    world.transport.bind = lambda group: bound.append(group.hop) or bind(group)
    begun = []
    for _ in range(4):
        begun.append(len(bound))
        model(torch.ones(1, 16)).sum().backward()
    assert replica.buckets[0].names == ("second.bias",)
    assert set(begun[first:]) == {len(bound)}


@pytest.mark.parametrize("algorithm", [make() for make in ALGORITHMS.values()], ids=ALGORITHMS)
def test_attach_connects_to_every_peer_of_a_step(algorithm, monkeypatch):
    met, bind = defaultdict(set), LocalTransport.bind

    def recorded(self, group):
        exchange = bind(self, group)
        pairs = {("to", p.peer, self.rank) for p in group.sends} | {("from", p.peer, self.rank) for p in group.recvs}

        def run(tag):
            met[tag.bucket].update(pairs)
            exchange(tag)

        return run

    monkeypatch.setattr(LocalTransport, "bind", recorded)
    run_ranks(5, lambda world: train(world, algorithm, steps=2), connect=over_threads)
    assert met["greeting"] == met[0] != set()


class OnlyItsSchedule(commrt.Gossip):
    """Gossip whose rounds say otherwise than its schedule."""

    def schedule(self, step, ranks):
        return hypercube(ranks, 0, 0.5)


@on_ranks(4)
def test_a_schedule_that_a_class_overrides_alone_is_the_one_that_runs(world):
    model = nn.Linear(1, 1, bias=False)
    commrt.attach(model, algorithm=OnlyItsSchedule(payload="gradients"), world=world)
    for _ in range(3):
        model.weight.grad = None
        model(torch.full((1, 1), float(world.rank))).sum().backward()
        assert model.weight.grad.item() == (0.5 if world.rank < 2 else 2.5)


def test_the_time_in_which_buffers_are_sent_counts():
    def body(world):
        model = nn.BatchNorm1d(2)
        replica = commrt.attach(model, world=world)
        for _ in range(3):
            model(torch.ones(3, 2)).sum().backward()
        (state,) = (span for span in replica.last.spans if span.bucket == "state")
        return state.end_s - state.begin_s

    slow = with_faults(delay_at(bucket="state", step=2, seconds=0.05))  # step 1 begins with another broadcast
    assert min(run_ranks(2, body, wrap=slow)) >= 0.05
