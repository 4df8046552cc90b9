# SPDX-License-Identifier: Apache-2.0
"""Local SGD where ranks run out of data, have no batch, or skip a step."""

from __future__ import annotations

import pytest
import torch
from cases import for_each, on_ranks, taking_turns
from gossip_models import batch, local_step, params, same
from local_loops import ALGORITHMS, GOSSIPING, PATIENT_S, Loop

from commrt.errors import UsageError
from commrt.local_sgd import LocalSGD, SlowMomentum
from commrt.testing.ranks import run_ranks


class Scaled:
    """A loop with a `GradScaler` and a schedule of the learning rate; one rank meets an infinity in some steps."""

    def __init__(self, world, algorithm, skipped):
        self.loop, self.skipped = Loop(world, algorithm), skipped
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.loop.optimizer, 20)

    def run(self, steps):
        loop = self.loop
        for _ in range(steps):
            loop.optimizer.zero_grad()
            loss = loop.model(batch(loop.step, loop.world.rank)).square().sum()
            if loop.world.rank == 1 and loop.step in self.skipped:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            self.scaler.step(loop.optimizer)
            self.scaler.update()
            self.schedule.step()
            loop.step += 1
        return loop


@for_each("delay", [0, 1])
def test_a_skipped_step_at_a_periods_end_has_the_settings_of_its_own_backward_pass(delay):
    def body(world):
        loop = Scaled(world, LocalSGD(2, delay), skipped=(1, 2, 5)).run(8)
        loop.replica.consolidate()
        return params(loop.model)

    assert same(*run_ranks(2, body))


@for_each("delay", [0, 2])
def test_a_checkpoint_after_a_step_that_one_rank_skipped_can_be_loaded(delay):
    def body(world):
        state = Scaled(world, LocalSGD(4, delay), skipped=(3,)).run(4).state()
        loop = Loop(world, LocalSGD(4, delay)).load(state).run(3)
        loop.replica.consolidate()
        return loop.replica.step, params(loop.model)

    (steps, first), (_, second) = run_ranks(2, body)
    assert steps == 7
    assert same(first, second)


@for_each(("last", "delay"), [(False, 1), (True, 0), (True, 1)])
def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts(last, delay):
    def body(world):
        loop, scaler = Loop(world, LocalSGD(2, delay)), torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(8):
            loop.optimizer.zero_grad()
            loss = loop.model(batch(step, world.rank)).square().sum()
            if world.rank == 1 and step in ((3, 7) if last else (3, 4)):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
        loop.replica.drain()
        loop.replica.consolidate()
        return loop.replica.step, params(loop.model)

    found = run_ranks(2, body)
    assert [steps for steps, _ in found] == [8, 8]
    assert same(found[0][1], found[1][1])


def test_ranks_run_out_of_data_where_learning_rates_follow_a_schedule():
    def body(world):
        loop = Loop(world, LocalSGD(2, 1))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 20)
        with loop.replica.join(schedule):
            for _ in range(3 + 4 * world.rank):
                loop.run(1)
                schedule.step()
        return params(loop.model), schedule.last_epoch

    (first, own), (second, other) = run_ranks(2, body, timeout_s=PATIENT_S)
    assert same(first, second)
    assert own == other == 7


@on_ranks(2)
def test_join_refuses_an_outer_rule_that_needs_learning_rates(world):
    loop = Loop(world, LocalSGD(2, outer=SlowMomentum()))
    with pytest.raises(UsageError, match="with SlowMomentum: it divides"), loop.replica.join():
        pass


@for_each(
    ("batches", "algorithm"),
    taking_turns([(3, 6), (6, 3), (0, 4), (2, 7, 4), (2, 7, 4), (2, 7, 4)], [ALGORITHMS[1], GOSSIPING, ALGORITHMS[2]]),
)
def test_ranks_that_run_out_of_data_answer_the_others_and_all_end_equal(batches, algorithm):
    def body(world):
        loop = Loop(world, algorithm)
        with loop.replica.join():
            loop.run(batches[world.rank])
        first = loop.replica.step, params(loop.model), loop.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        loop.run(4)
        loop.replica.consolidate()
        return *first, params(loop.model)

    found = run_ranks(len(batches), body, timeout_s=PATIENT_S)
    for steps, weights, momentum, later in found:
        assert steps == max(batches)
        assert same(weights, found[0][1])
        assert torch.equal(momentum, found[0][2])
        assert same(later, found[0][3])


def test_ranks_run_out_of_data_where_two_models_train_alone():
    def body(world):
        loop, _ = Loop(world, LocalSGD(2, 1)), Loop(world, LocalSGD(1000))
        with loop.replica.join():
            loop.run(2 + 3 * world.rank)
        return params(loop.model)

    first, second = run_ranks(2, body, timeout_s=PATIENT_S)
    assert same(first, second)


def test_a_rank_without_a_batch_takes_part():
    def body(world):
        loop = Loop(world, LocalSGD(2, 1))
        for step in range(6):
            if world.rank == 0 and step in (1, 2):
                loop.replica.average()
            else:
                local_step(loop.model, loop.optimizer, step, world.rank)
        loop.replica.consolidate()
        return params(loop.model)

    found = run_ranks(2, body)
    assert same(*found)
