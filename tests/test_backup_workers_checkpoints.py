# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and consolidate() with backup workers."""

from __future__ import annotations

from copy import deepcopy
from time import monotonic

import pytest
from cases import on_ranks
from late_ranks import AT, Loop, all_are_equal, at, backward, to_the_late_step, trainee, weights

import commrt
from commrt.errors import UsageError
from commrt.testing.ranks import run_ranks


def test_training_resumes_from_a_checkpoint_with_its_step_numbers():
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))

        def train(steps):
            while at(replica) < steps:
                backward(model, world.rank, replica.step)
                optimizer.step()

        train(3)
        replica.consolidate()
        saved = deepcopy((model.state_dict(), optimizer.state_dict())), replica.state_dict()
        train(6)
        replica.consolidate()
        (weights, state), kept = saved
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        replica.load_state_dict(kept)
        again = replica.step
        train(kept["step"] + 3)
        return again, kept["step"], replica.replicas_equal()

    for again, saved, equal in run_ranks(3, body):
        assert again == saved
        assert equal


def test_a_collective_sends_weights_that_are_clamped_after_every_step():
    def body(loop, world):
        model, optimizer, replica = trainee(world, loop.algorithm)

        def step():
            backward(model, world.rank, replica.step)
            optimizer.step()
            for param in model.parameters():
                param.data.clamp_(-0.1, 0.1)
            loop.progress.tell(replica._backup_step.version)

        while at(replica) < AT:
            step()
        loop.wait(world, replica)
        step()
        return replica.replicas_equal(), replica.state_dict()["step"]

    assert Loop().run(body) == [(True, AT + 1)] * 4


def test_a_loaded_checkpoint_makes_all_ranks_equal_whatever_each_had_before():
    def body(loop, world):
        model, optimizer, replica = trainee(world, loop.algorithm)
        first = deepcopy((model.state_dict(), optimizer.state_dict(), replica.state_dict()))
        step = to_the_late_step(loop, world, replica, optimizer)
        if world.rank == 0:  # a batch more than the others: nobody uses it
            step()
        model.load_state_dict(first[0])
        optimizer.load_state_dict(first[1])
        replica.load_state_dict(first[2])
        assert replica.replicas_equal()
        while at(replica) < AT:
            step()
        replica.consolidate()
        momenta = [optimizer.state[param]["momentum_buffer"].clone() for param in model.parameters()]
        return [*weights(model), *momenta]

    assert all_are_equal(Loop().run(body))


def test_a_late_rank_is_not_stuck_if_the_others_skipped_their_last_update():
    def body(loop, world):
        model, optimizer, replica = trainee(world, loop.algorithm)
        while at(replica) < AT:
            backward(model, world.rank, replica.step)
            optimizer.step()
        loop.wait(world, replica)
        backward(model, world.rank, replica.step)  # and no step: its norm is too large
        loop.progress.tell(replica._backup_step.version)
        begin_s = monotonic()
        equal = replica.replicas_equal()
        took_s = monotonic() - begin_s
        while at(replica) < loop.steps:
            backward(model, world.rank, replica.step)
            optimizer.step()
        replica.consolidate()
        return equal, took_s, weights(model)

    ends = Loop().run(body)
    assert all(took_s < 10 for _, took_s, _ in ends)  # of 20 until the deadline
    assert all_are_equal([found for _, _, found in ends])


@on_ranks(2)
def test_a_step_with_gradients_from_before_consolidate_is_refused(world):
    model, optimizer, replica = trainee(world, commrt.BackupWorkers(0))
    backward(model, world.rank, 0)
    replica.consolidate()
    with pytest.raises(UsageError, match="with gradients from before consolidate"):
        optimizer.step()
    backward(model, world.rank, 1)
    optimizer.step()
    assert replica.replicas_equal()
