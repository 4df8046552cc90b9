# SPDX-License-Identifier: Apache-2.0
"""Backup workers in collectives of all ranks, at the end of data, and when ranks die."""

import threading
from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
import torch
from cases import for_each, on_ranks
from failing_ranks import raised
from late_ranks import (
    AT,
    LATE,
    LIMIT_S,
    MODEL,
    NORMED,
    Loop,
    Progress,
    Trainee,
    all_are_equal,
    at,
    backward,
    on_loop,
    sgd,
    trainee,
    weights,
)

import commrt
from commrt.errors import PeerLost, Place, QuorumLost, UsageError
from commrt.testing.ranks import run_ranks


@on_ranks(4)
def test_batches_dropped_at_the_end_of_an_epoch_leave_no_trace_in_the_next_one(world):
    model = deepcopy(NORMED)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world, also=[scheduler])
    for _ in range(3):
        for _ in range(7 if world.rank == LATE else 3):
            backward(model, world.rank, replica.step)
            optimizer.step()
            scheduler.step()
        assert replica.replicas_equal()
    assert scheduler.last_epoch == replica.step


@on_ranks(2)
def test_a_world_can_be_closed_after_a_backward_pass_that_did_not_end(world):
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    commrt.attach(model, optimizer, commrt.BackupWorkers(0, early=True), world=world, bucket_cap_mb=1e-4)

    def fail(_):
        raise OnPurposeError

    model[0].weight.register_hook(fail)
    with pytest.raises(OnPurposeError):
        backward(model, world.rank, 0)
    world.close()


@for_each("batches", [(9, 9, 9, 5), (9, 9, 4, 4), (3, 9, 9, 30)])
def test_no_rank_waits_for_ranks_that_ran_out_of_data(batches):
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        for _ in range(batches[world.rank]):
            backward(model, world.rank, replica.step)
            optimizer.step()
        replica.consolidate()
        return replica.step, replica.replicas_equal(), replica.last

    ends = run_ranks(4, body)
    assert {step for step, _, _ in ends} == {ends[0][0]}
    most = max(step for step in range(max(batches) + 1) if sum(min(each, step) for each in batches) >= 3 * step)
    assert most >= ends[0][0] >= min(batches)  # each counts once in a step at most
    assert all(equal for _, equal, _ in ends)
    assert ends[batches.index(max(batches))][2].ended or max(batches) < 30


@for_each("timeout_s", [2.0, 8.0])
def test_a_late_rank_reaches_the_collective_in_which_others_wait_at_any_timeout(timeout_s):
    progress = Progress()

    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        if world.rank == LATE:
            progress.wait_for(2)
        for _ in range(2):  # the late rank's second batch is of a step that nobody else comes to
            backward(model, world.rank, replica.step)
            optimizer.step()
        progress.tell(2)
        replica.consolidate()
        return replica.step, replica.replicas_equal()

    assert run_ranks(4, body, timeout_s=timeout_s) == [(2, True)] * 4


class OnPurposeError(Exception):
    """What ends a rank in these tests."""


def ended(ranks, body, **options):
    """What each rank returned, or raised: then it gives its world up."""

    def one(world):
        try:
            return body(world)
        except Exception as error:  # what it is, the test looks at
            world.abort(error)
            return error

    return run_ranks(ranks, one, **options)


def dying_in_turn(backups, dying, saved):
    """Five ranks train nine steps; a rank dies at the first step of its own that is not before `dying[rank]`.

    Nobody is further then.
    """
    gone = {rank: threading.Event() for rank in dying}

    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(backups))
        replica.before_giving_up(lambda: saved.append((world.rank, replica.step)))
        while at(replica) < 9:
            if replica.step >= dying.get(world.rank, 9):
                world.abort(error := OnPurposeError())
                gone[world.rank].set()
                raise error
            backward(model, world.rank, replica.step)  # its forward pass gives weights to those who are late
            for rank in dying:
                assert replica.step <= dying[rank] or gone[rank].wait(LIMIT_S), f"rank {rank} did not die"
            optimizer.step()
        return replica.replicas_equal(), [loss.rank for loss in replica.lost]

    return ended(5, body)


def test_one_death_more_than_backups_ends_all_ranks_with_a_checkpoint_and_an_error():
    saved = []
    ends = dying_in_turn(1, {1: 3, 4: 5}, saved)
    for rank in (0, 2, 3):
        assert isinstance(ends[rank], commrt.TransportError)
        assert isinstance(ends[rank], QuorumLost) or isinstance(ends[rank].__cause__, QuorumLost)
    assert sorted(rank for rank, _ in saved) == [0, 2, 3]
    assert {step for _, step in saved} == {5}


@for_each("dies_at", [5, 7])
def test_a_death_at_the_end_of_an_epoch_does_not_stop_ranks_at_different_steps(dies_at):
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        rng = Random(world.rank)
        for epoch in range(2):
            for number in range(8):
                if (world.rank, epoch, number) == (2, 1, dies_at):
                    raise OnPurposeError
                threading.Event().wait(rng.uniform(0, 0.01))  # so that others are late each time
                backward(model, world.rank, replica.step)
                optimizer.step()
            assert replica.replicas_equal()
        return tuple(world.members)

    ends = ended(4, body, timeout_s=8.0)
    assert isinstance(ends[2], OnPurposeError)
    assert ends[:2] + ends[3:] == [(0, 1, 3)] * 3


def test_world_run_does_not_send_weights_that_the_loop_has_swapped():
    def body(loop, world):
        rank = Trainee(loop, world)
        rank.train_to_the_late_step()
        kept = deepcopy(rank.model.state_dict())
        for param in rank.model.parameters():
            param.data.zero_()
        world.run(commrt.Ring().schedule(0, world.size), torch.ones(8))
        rank.model.load_state_dict(kept)
        was_behind = rank.replica.step > rank.replica._standing.version
        rank.train()
        rank.replica.consolidate()
        return was_behind, weights(rank.model)

    ends = Loop().run(body)
    assert [was_behind for was_behind, _ in ends] == [rank == LATE for rank in range(4)]
    assert all_are_equal([found for _, found in ends])
    assert all(tensor.any() for tensor in ends[LATE][1])


@on_loop()
def test_a_collective_sends_weights_that_are_clamped_after_every_step(rank):
    def clamp():
        for param in rank.model.parameters():
            param.data.clamp_(-0.1, 0.1)

    rank.train(clamp, until=AT + 1)
    assert rank.replica.replicas_equal()
    assert rank.replica.state_dict()["step"] == AT + 1


@on_loop()
def test_a_late_rank_is_not_stuck_if_the_others_skipped_their_last_update(rank):
    rank.train(until=AT)
    rank.backward()  # and no step: its norm is too large
    rank.tell()
    assert rank.replica.replicas_equal()
    assert rank.replica.lost == ()  # nobody waited until the deadline
    rank.train()
    assert rank.replica.replicas_equal()


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


def test_ranks_that_come_to_different_collectives_all_learn_it_at_once_and_the_world_goes_on():
    other_has_come = threading.Event()

    def body(world):
        replica = trainee(world, commrt.BackupWorkers(1))[2]
        if world.rank == 0:
            before = world.hooks.before_collective
            world.hooks = replace(world.hooks, before_collective=lambda: (before(), other_has_come.set()))
        if world.rank == 1:
            assert other_has_come.wait(LIMIT_S)
            said = raised(lambda: world.all_reduce(torch.ones(2)))
        else:
            said = raised(replica.consolidate)
        return said, replica.replicas_equal(), replica.lost

    for said, is_equal, lost in run_ranks(4, body):
        assert "make the same collective calls in the same order on all ranks" in said
        assert (is_equal, lost) == (True, ())


@on_ranks(4)
def test_a_refusal_of_one_rank_alone_ends_the_collective_for_all_and_the_world_goes_on(world):
    trainee(world, commrt.BackupWorkers(1))
    schedule, refusals = world._sums.schedule, [UsageError("no schedule of so many ranks")]

    def refuse_once(*what):
        if world.rank == 1 and refusals:
            raise refusals.pop()
        return schedule(*what)

    world._sums.schedule = refuse_once
    said = raised(lambda: world.all_reduce(torch.ones(2)))
    world.all_reduce(total := torch.ones(2), "sum")
    assert said.startswith("UsageError" if world.rank == 1 else "DisagreementError: rank 1 refused: no schedule of so")
    assert total.tolist() == [4.0, 4.0]


@for_each("is_broken", [False, True])
def test_a_refusal_after_a_collective_inside_another_is_passed_on(is_broken):
    def body(world):
        trainee(world, commrt.BackupWorkers(1))
        membership, failures = world.membership, [PeerLost("a cut wire", Place(0))] * (is_broken and world.rank == 0)

        def fail_once():
            if failures:
                raise failures.pop()

        with membership.collective("the outer one"):
            membership.together(int)
            with membership.collective("the inner one"):
                membership.together(fail_once)
            assert membership.number >= is_broken  # rank 1 may have refused already
            if world.rank == 1:
                raise UsageError("not this one")
            return membership.together(int)

    said = run_ranks(3, lambda world: raised(lambda: body(world)), timeout_s=LIMIT_S)
    assert said[1] == "UsageError: not this one"
    assert all(each.startswith("DisagreementError: rank 1 refused: not this one") for each in said[::2])


@for_each(("times", "says"), [(1, None), (9, "not all 3 ranks connected")])
def test_connections_that_fail_are_made_in_the_next_attempt_with_the_ranks_that_come(times, says):
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        failures = [commrt.TransportError("not all 3 ranks connected")] * times
        connect = world.reconnect_options.connect

        def unlucky(*where):
            if failures:
                raise failures.pop()
            return connect(*where)

        if world.rank == 1:
            world.reconnect_options = world.reconnect_options._replace(connect=unlucky)
        for step in range(3):
            if (world.rank, step) == (3, 1):
                raise OnPurposeError
            backward(model, world.rank, step)
            optimizer.step()
        return replica.replicas_equal()

    ends = ended(4, body, timeout_s=4.0)
    assert isinstance(ends[3], OnPurposeError)
    if says is None:
        assert ends[:3] == [True] * 3
    else:
        assert says in f"{ends[1]} {ends[1].__cause__}"
