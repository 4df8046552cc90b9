# SPDX-License-Identifier: Apache-2.0
"""Gossip and local SGD, where each rank has weights of its own, under the same loops: the questions are those of both.

Ranks run out of data, have no batch, skip a step or accumulate; states are saved and loaded; models leave and come.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import batch, local_step, model_of, params, same
from local_loops import ALGORITHMS, GOSSIPING, PATIENT_S, Loop, ends_equal
from torch.optim.lr_scheduler import CosineAnnealingLR

import commrt
from commrt import Gossip
from commrt.errors import UsageError
from commrt.local_sgd import LocalSGD, SlowMomentum
from commrt.testing.ranks import run_ranks

WAYS = [Gossip(), Gossip(staleness=1), LocalSGD(3, 2), LocalSGD(2), GOSSIPING]
BATCHES = [(3, 6), (6, 3), (0, 4), (2, 7, 4), (4, 0, 0, 1), (5, 5)]
"""How many each rank has."""


def momenta(loop):
    return [state["exp_avg"].clone() for state in loop.optimizer.state.values()]


@for_each(("batches", "algorithm"), taking_turns(BATCHES + BATCHES[:2], WAYS))
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, algorithm):
    def body(world):
        loop = Loop(world, algorithm)
        schedule = CosineAnnealingLR(loop.optimizer, 20)
        with loop.replica.join(schedule):
            for _ in range(batches[world.rank]):
                loop.run(1)
                schedule.step()
        joined = loop.replica.step, schedule.last_epoch, [*params(loop.model), *momenta(loop)]
        loop.run(2)
        with loop.replica.join(schedule):
            loop.run(world.rank)
        loop.replica.consolidate()
        return *joined, loop.replica.step, params(loop.model)

    ranks, most = len(batches), max(batches)
    found = run_ranks(ranks, body, timeout_s=PATIENT_S)
    for steps, epoch, joined, last, weights in found:
        assert (steps, epoch, last) == (most, most, most + 2 + ranks - 1)
        assert same(joined, found[0][2])
        assert same(weights, found[0][4])


@on_ranks(1)
def test_join_inside_join_is_refused(world):
    replica = Loop(world, Gossip()).replica
    with replica.join(), pytest.raises(UsageError, match=r"join\(\) inside join\(\)"), replica.join():
        pass


@on_ranks(2)
def test_join_refuses_an_outer_rule_that_needs_learning_rates(world):
    loop = Loop(world, LocalSGD(2, outer=SlowMomentum()))
    with pytest.raises(UsageError, match="with SlowMomentum: it divides"), loop.replica.join():
        pass


@on_ranks(2, timeout_s=PATIENT_S)
def test_collectives_are_refused_inside_join(world):
    replica = Loop(world, Gossip()).replica
    with replica.join():
        for refused in (replica.consolidate, replica.disagreement, replica.replicas_equal):
            with pytest.raises(UsageError, match=r"inside join\(\)"):
                refused()


def scaled(loop, steps, skipped):
    """Train with a `GradScaler` and a schedule of the learning rate; rank 1 meets an infinity in steps `skipped`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = CosineAnnealingLR(loop.optimizer, 20)
    for step in range(steps):
        loop.optimizer.zero_grad()
        loss = loop.model(batch(step, loop.world.rank)).square().sum()
        is_infinite = loop.world.rank == 1 and step in skipped
        scaler.scale(loss * (float("inf") if is_infinite else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        schedule.step()
    loop.step = steps
    return scaler


@for_each(
    ("algorithm", "skipped"),
    taking_turns([Gossip(), LocalSGD(2), LocalSGD(2, 1), LocalSGD(2), LocalSGD(2, 1)], [(1, 2, 5), (3, 7), (1, 2, 5)]),
)
@ends_equal(2)
def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts_with_the_settings_of_its_own_pass(
    world, algorithm, skipped
):
    loop = Loop(world, algorithm)
    scaler = scaled(loop, 8, skipped)
    loop.replica.consolidate()
    assert loop.replica.step == 8
    assert scaler.get_scale() == (4.0 / 2 ** len(skipped) if world.rank == 1 else 4.0)
    return params(loop.model)


@for_each("algorithm", WAYS)
@ends_equal(2)
def test_a_rank_without_a_batch_takes_part(world, algorithm):
    loop = Loop(world, algorithm)
    for step in range(6):
        if world.rank == 0 and step in (1, 2):
            loop.replica.average()
        else:
            local_step(loop.model, loop.optimizer, step, world.rank)
    loop.replica.consolidate()
    assert loop.replica.step == 6
    return params(loop.model)


@for_each("algorithm", [Gossip(), LocalSGD(2)])
@on_ranks(2)
def test_passes_that_only_accumulate_are_no_steps(world, algorithm):
    loop = Loop(world, algorithm)
    for step in range(12):
        with loop.replica.no_sync() if step % 3 < 2 else nullcontext():
            loop.model(batch(step, world.rank)).square().sum().backward()
        if step % 3 == 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    loop.replica.drain()
    assert loop.replica.step == 4
    assert loop.replica.disagreement() < 1e-6


@for_each(
    ("algorithm", "steps"),
    [
        (Gossip(), 7),
        (LocalSGD(100), 7),
        (LocalSGD(4, 3), 8),  # an average has just left
        (LocalSGD(4, 3), 10),  # and here steps ago
        (LocalSGD(6, 5, fragments=2), 9),
        (LocalSGD(4, 4), 8),
    ],
)
def test_consolidate_makes_all_equal_at_their_mean_and_loses_nothing_that_ranks_have_learned(algorithm, steps):
    def body(world):
        loop = Loop(world, algorithm, make=torch.optim.SGD).run(steps)
        before = params(loop.model)
        loop.replica.consolidate()
        assert loop.replica.replicas_equal()
        assert loop.replica.disagreement() < 1e-6
        return before, params(loop.model)

    before, after = zip(*run_ranks(3, body), strict=True)
    for place, weights in enumerate(after[0]):
        mean = torch.stack([params[place] for params in before]).mean(0)
        torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6)


SLOW_WAYS = [pytest.param(each, marks=pytest.mark.slow) for each in (ALGORITHMS[1], *ALGORITHMS[3:6], GOSSIPING)]


@pytest.mark.parametrize("algorithm", [Gossip(), ALGORITHMS[2], *SLOW_WAYS], ids=str)
def test_training_goes_on_from_a_checkpoint_with_the_same_bits_as_without_one(algorithm):
    def unbroken(world):
        return params(Loop(world, algorithm).run(12).model)

    def saving(world):
        loop = Loop(world, algorithm)
        states[world.rank] = {step: loop.run(step - loop.step).state() for step in saved}
        return params(loop.run(12 - loop.step).model)

    def resumed(world, step):
        loop = Loop(world, algorithm, model_of(1)).load(states[world.rank][step])
        return params(loop.run(12 - step).model)

    states, saved = {}, (4, 5, 8)
    expected = run_ranks(3, unbroken)
    assert all(map(same, run_ranks(3, saving), expected))
    for step in saved:
        assert all(map(same, run_ranks(3, partial(resumed, step=step)), expected))


@for_each("algorithm", [Gossip(), LocalSGD(3, 2)])
@ends_equal(2)
def test_a_detached_model_trains_alone_and_can_be_attached_again(world, algorithm):
    loop = Loop(world, algorithm).run(4)
    loop.replica.detach()
    loop.run(3)
    again = commrt.attach(loop.model, loop.optimizer, algorithm, world=world)
    loop.run(4)
    again.consolidate()
    assert (loop.replica.step, again.step) == (4, 4)
    return params(loop.model)
