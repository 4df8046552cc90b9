# SPDX-License-Identifier: Apache-2.0
"""Training by gossip, also by loops that save, copy or compile the model: the bits of a simulation in one process."""

import threading

import pytest
import torch
from cases import for_each, on_ranks, pairwise
from gossip_models import (
    PATIENT_S,
    STEPS,
    local_step,
    model_of,
    params,
    same,
    simulated,
    trained,
    trainee,
)
from small_models import sgd
from torch import nn

import commrt
from commrt.algorithms.gossip import Gossip
from commrt.errors import DisagreementError
from commrt.testing.ranks import run_ranks

ONE_BUCKET_MB = 25
RUNS = [(1, 0, ONE_BUCKET_MB), (2, 0, 1e-4), (2, 1, 1e-6), (3, 0, ONE_BUCKET_MB)]
RUNS += [(4, 0, 1e-6), (4, 1, 1e-4), (5, 0, 1e-4), (5, 1, ONE_BUCKET_MB)]


@for_each(("ranks", "staleness", "cap_mb"), RUNS)
def test_training_gives_the_bits_of_the_simulation_in_however_many_buckets(ranks, staleness, cap_mb):
    algorithm = Gossip(staleness=staleness)
    found = run_ranks(ranks, lambda world: trained(world, algorithm, cap_mb=cap_mb))
    assert all(same(bits, expected) for (bits, _), expected in zip(found, simulated(algorithm, ranks), strict=True))
    assert (len(found[0][1].buckets) == 1) == (cap_mb == ONE_BUCKET_MB)
    assert {replica.step for _, replica in found} == {STEPS}


def test_gossip_of_rows_makes_rows_equal_and_all_near_each_other():
    found = run_ranks(6, lambda world: (trained(world, Gossip(within=2))[0], world.rank))
    by_rank = {rank: bits for bits, rank in found}
    pairs = [zip(by_rank[2 * row], by_rank[2 * row + 1], strict=True) for row in range(3)]
    assert all(torch.allclose(a, b, atol=1e-6) for pair in pairs for a, b in pair)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(by_rank[0], by_rank[2], strict=True))


def apart(world, algorithm, wire, rounds=6):
    """Replicas that begin far from each other and learn nothing; means and disagreements before and after."""
    model = model_of()
    replica = commrt.attach(model, None, algorithm, world=world, wire=wire, bucket_cap_mb=1e-4)
    with torch.no_grad():
        for param, other in zip(model.parameters(), model_of(1 + world.rank).parameters(), strict=True):
            param.copy_(other)
    before = params(model), replica.disagreement()
    for _ in range(rounds):
        replica.average()
    replica.drain()
    return before, (params(model), replica.disagreement())


@for_each(("wire", "staleness"), pairwise([None, torch.bfloat16, torch.float16], [0, 1]))
def test_mixing_keeps_the_mean_also_where_the_wire_rounds(wire, staleness):
    outcomes = run_ranks(4, lambda world: apart(world, Gossip(staleness=staleness), wire))
    bits = [[before[0] for before, _ in outcomes], [after[0] for _, after in outcomes]]
    before, after = ([torch.stack(parts).mean(0) for parts in zip(*each, strict=True)] for each in bits)
    for was, now in zip(before, after, strict=True):
        assert torch.allclose(was, now, rtol=0, atol=3e-7)
    for (_, apart_before), (_, apart_after) in outcomes:
        assert apart_after < apart_before / 3


def test_buffers_are_averaged_and_counters_stay():
    def body(world):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, Gossip(rotate=False), world=world)
        for step in range(4):
            local_step(model, optimizer, step, world.rank)
        replica.drain()
        return [buffer.clone() for buffer in model[1].buffers()]

    ours, theirs = run_ranks(2, body)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours[2] == 4


def test_a_late_partner_is_not_waited_for_with_staleness_1():
    """Rank 1 stops after its second step until rank 0 has begun its fourth, which is one ahead of what it heard."""
    ahead, ranks = threading.Event(), 2

    def body(world):
        model, optimizer, replica = trainee(world, Gossip(staleness=1))
        for step in range(5):
            local_step(model, optimizer, step, world.rank)
            if world.rank == 0 and step == 2:
                ahead.set()
            if world.rank == 1 and step == 1:
                assert ahead.wait(PATIENT_S)
        replica.drain()
        return replica.step

    assert run_ranks(ranks, body) == [5, 5]


@on_ranks(2)
def test_the_report_says_what_a_step_cost(world):
    _, replica = trained(world, Gossip())
    totals, buckets = replica.stats(), len(replica.buckets)
    assert [span.bucket for span in replica.last.spans][-buckets:] == [*range(buckets)]
    assert replica.last.exposed_s >= 0
    assert totals.nbytes_sent > 0
    assert (totals.steps, totals.counted) == (STEPS, STEPS)


# loops that save, copy, compile or take the model apart


def test_saving_a_model_waits_for_what_is_under_way():
    def body(world):
        model, optimizer, _ = trainee(world, Gossip(staleness=1), bucket_cap_mb=1e-4)
        for step in range(3):
            local_step(model, optimizer, step, world.rank)
        return [value.clone() for value in model.state_dict().values()]

    assert all(map(same, run_ranks(2, body), simulated(Gossip(staleness=1), 2, steps=3)))


def part_by_part(model):
    """Calls the parts, never the module that is attached."""

    def call(x):
        for part in model:
            x = part(x)
        return x

    return model, call


@for_each("prepare", [part_by_part, lambda model: (model, torch.compile(model, backend="eager"))])
def test_parameters_are_mixed_in_time_however_the_model_is_called(prepare):
    def body(world):
        model = model_of()
        optimizer = sgd(model)
        attached, call = prepare(model)
        replica = commrt.attach(attached, optimizer, Gossip(), world=world, bucket_cap_mb=1e-6)
        for step in range(STEPS):
            local_step(call, optimizer, step, world.rank)
        replica.drain()
        return params(model)

    assert all(map(same, run_ranks(3, body), simulated(Gossip(), 3)))


def test_ranks_at_different_steps_are_told_so():
    def body(world):
        replica = trainee(world, Gossip(rotate=False))[2]
        replica._restart_at_step(world.rank)
        replica.average()
        replica.drain()

    with pytest.raises(DisagreementError, match="the ranks are at different steps"):
        run_ranks(2, body)
