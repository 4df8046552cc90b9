# SPDX-License-Identifier: Apache-2.0
"""The ranks of a step run the same schedule, in every step; headers show where they differ."""

from collections import defaultdict
from functools import lru_cache

import numpy as np
import pytest
import torch
from cases import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import commrt
from commrt.algorithms import ring
from commrt.algorithms.catalogue import ALGORITHMS
from commrt.algorithms.gossip import hypercube
from commrt.buckets.header import EXPLANATIONS, WIDTHS, Header, encode, explain_mismatch
from commrt.errors import CommrtError, DisagreementError
from commrt.kernels.torch_packing import bits
from commrt.schedule import Schedule, Step
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


@on_ranks(4, timeout_s=4.0)
def test_a_rank_that_alone_runs_another_schedule_ends_the_step_on_every_rank(world):
    with pytest.raises(CommrtError):
        train(world, Moody((1, 2), since=2 if world.rank == 2 else 100))
    assert world.closed


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


# The headers of buckets survive being summed.

CLAIMS = st.builds(Header, *(st.integers(0, (1 << width) - 1) for width in WIDTHS))


@given(CLAIMS, st.integers(1, 64), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_equal_claims_of_any_number_of_ranks_show_the_own_header(claim, ranks, dtype):
    total = torch.zeros(64, dtype=dtype)
    for _ in range(ranks):
        total += bits(encode(claim))
    assert torch.equal(total != 0, bits(encode(claim)))


@given(CLAIMS, st.sampled_from(Header._fields), st.data())
def test_a_claim_that_differs_in_one_thing_is_explained_by_that(claim, name, data):
    other = data.draw(st.integers(0, (1 << getattr(WIDTHS, name)) - 1).filter(lambda v: v != getattr(claim, name)))
    total = bits(encode(claim)).float() + bits(encode(claim._replace(**{name: other}))).float()
    assert not torch.equal(total != 0, bits(encode(claim)))
    assert explain_mismatch(total) == EXPLANATIONS[name]


def test_numbers_beyond_the_width_count_on_from_zero():
    assert encode(Header(0, 65, 32, 64, 64, 256)) == encode(Header(0, 1, 0, 0, 0, 0))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_what_is_no_sum_of_headers_is_called_that_or_a_difference(value):
    nothing = "it is no sum of headers: the ranks run different programs, or models in different orders"
    assert explain_mismatch(torch.full((64,), value)) in {nothing, *EXPLANATIONS.values()}
