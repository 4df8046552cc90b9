# SPDX-License-Identifier: Apache-2.0
"""Training with backup workers: exactly N gradients count in a step, and replicas stay equal."""

import re
from copy import deepcopy
from threading import Event
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from cases import for_each, on_ranks, pairwise
from late_ranks import AT, LATE, NORMED, Loop, Trainee, at, backward, batch, on_loop, sgd, trainee, weights

import commrt
from commrt.backup_workers import quorum, stall
from commrt.buckets.engine import Engine
from commrt.elastic.elastic_membership import ATTEMPTS
from commrt.errors import UsageError
from commrt.testing.ranks import over_threads, run_ranks
from commrt.threads.deadline import Deadline


@for_each(("ranks", "early", "wire"), pairwise([2, 3], [False, True], [None, torch.bfloat16]))
def test_without_backups_the_result_is_that_of_plain_averaging_bit_for_bit(ranks, early, wire):
    def one(world, algorithm):
        model = deepcopy(NORMED)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=1e-4, wire=wire)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(world.rank, step)).square().mean().backward()
            optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    inner = commrt.Torus2D()
    plain = run_ranks(ranks, lambda world: one(world, inner))
    backed = run_ranks(ranks, lambda world: one(world, commrt.BackupWorkers(0, inner, early)))
    for ours, theirs in zip(backed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_late_gradient_is_zeroed_its_step_changes_nothing_and_the_report_says_so():
    def body(loop, world):
        rank = Trainee(loop, world)
        rank.train(until=AT)
        rank.backward()
        before, gradients = weights(rank.model), [param.grad for param in rank.model.parameters()]
        rank.optimizer.step()
        seen = rank.replica.last, gradients, all(map(torch.equal, before, rank.model.parameters()))
        rank.tell()
        rank.train()
        return *seen, rank.replica.stats(), rank.replica.report()

    ends = Loop().run(body)
    late, gradients, same, stats, _ = ends[LATE]
    assert all(gradient is not None for gradient in gradients), "who looks at gradients finds None"
    assert not any(gradient.any() for gradient in gradients), "a gradient that came too late was left"
    assert same, "a gradient that came too late was stepped with"
    assert (late.counted, late.members, late.dropped) == (False, (0, 1, 3), (LATE,))
    assert late.late_s > 0
    assert late.samples == 12
    assert stats.counted < stats.steps
    assert stats.late_s >= late.late_s
    counted, *_, totals, table = ends[0]
    assert (counted.counted, counted.members, counted.dropped, counted.late_s) == (True, (0, 1, 3), (LATE,), 0.0)
    named = re.findall(r"of rank (\d) in (\d+)", table)
    assert str(LATE) in dict(named)
    assert sum(int(steps) for _, steps in named) == totals.dropped


def test_a_grad_scaler_that_met_an_infinity_while_a_rank_was_late_is_the_same_everywhere():
    def body(loop, world):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        rank = Trainee(loop, world, also=[scaler])
        scales = {}
        while (version := at(rank.replica)) < loop.steps:
            rank.wait()
            rank.optimizer.zero_grad()
            loss = rank.model(batch(world.rank, version)).square().mean()
            scale = scaler.get_scale()
            scaler.scale(loss * (float("inf") if version == AT else 1.0)).backward()
            scaler.step(rank.optimizer)
            scaler.update()
            if rank.replica.last.counted:
                scales[version] = scale
            rank.tell()
        return scales, rank.replica.replicas_equal()

    ends = Loop().run(body)
    for scales, equal in ends:
        assert equal
        assert all(scales[version] == ends[0][0].get(version, scales[version]) for version in scales)


@patch.object(quorum, "KEPT_STEPS", 4)
@patch.object(quorum, "DELETED_STEPS", 2)
@on_loop(late_by=16, steps=24)
def test_a_rank_that_missed_more_steps_than_the_store_keeps_catches_up(rank):
    rank.train()
    assert rank.replica.replicas_equal()


@on_loop()
def test_gradients_that_were_accumulated_are_dropped_or_counted_together(rank):
    while (version := at(rank.replica)) < 8:
        rank.optimizer.zero_grad()
        with rank.replica.no_sync():
            rank.model(batch(rank.rank, version)).square().mean().backward()
        rank.wait()
        rank.model(input=batch(rank.rank + 50, version)).square().mean().backward()
        rank.optimizer.step()
        assert rank.replica.last.samples == 24
        rank.tell()
    assert rank.replica.replicas_equal()


@on_loop()
def test_a_batch_that_was_dropped_is_given_out_again_until_it_counts(rank):
    counted, given_out = [], []
    for number in commrt.backup_workers.reissued(range(6), rank.replica):
        given_out.append(number)
        rank.step()
        if rank.replica.last.counted:
            counted.append(number)
    assert counted == list(range(len(counted)))
    assert rank.replica.last.ended or counted == list(range(6))
    assert len(given_out) >= len(counted)


def test_batches_of_one_accumulation_are_given_out_again_together():
    class Reported:
        last = None

    replica, seen = Reported(), []
    fates = iter([True, False, True])
    for number, each in enumerate(commrt.backup_workers.reissued("abcd", replica)):
        seen.append(each)
        if number % 2:
            replica.last = commrt.training.StepReport(0, (), 0.0, (), counted=next(fates, True))
    assert "".join(seen) == "abcdcd"


def test_a_slow_backward_pass_under_early_calls_nobody_to_a_new_generation(monkeypatch):
    monkeypatch.setattr(stall, "STALLED_S", 0.01)

    def body(world):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        algorithm = commrt.BackupWorkers(0, commrt.Ring(), early=True)
        replica = commrt.attach(model, sgd(model), algorithm, world=world, bucket_cap_mb=1e-6)
        model(torch.ones(1, 3)).sum().backward()
        if world.rank == 1:
            model[0].weight.register_hook(lambda _: Event().wait(0.5) or None)
        model(torch.ones(1, 3)).sum().backward()
        return replica.last.counted, world.membership.number

    assert run_ranks(2, body) == [(True, 0), (True, 0)]


def test_ranks_that_call_each_other_out_of_slow_reductions_go_on_and_wait_longer_each_time(monkeypatch):
    monkeypatch.setattr(stall, "STALLED_S", 1e-3)
    reduce_now, calls, limits_s = Engine.reduce_now, ATTEMPTS + 2, []

    def slow(engine, bucket, step, members):
        while step == 1 and engine.world.membership.number < calls and not engine.world.membership.is_called:
            Event().wait(0.01)
        return reduce_now(engine, bucket, step, members)

    def limit(seconds):
        limits_s.append(seconds)
        return Deadline(seconds)

    def body(world):
        model = torch.nn.Linear(3, 2)
        replica = commrt.attach(model, sgd(model), commrt.BackupWorkers(0, commrt.Ring()), world=world)
        model(torch.ones(1, 3)).sum().backward()
        model(torch.ones(1, 3)).sum().backward()
        return replica.last.counted

    monkeypatch.setattr(Engine, "reduce_now", slow)
    monkeypatch.setattr(stall, "Deadline", limit)
    assert run_ranks(2, body) == [True, True]
    assert max(limits_s) >= 8 * stall.STALLED_S  # of seven calls one of two ranks makes four


def test_one_rank_alone_is_legal():
    with commrt.init() as world:
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        backward(model, 0, 0)
        optimizer.step()
        assert replica.step == 1
        replica.detach()


@for_each(("ranks", "backups", "most"), [(2, 1, 0), (3, 2, 1), (4, 2, 1), (5, 3, 2)])
def test_as_many_backups_as_members_are_refused(ranks, backups, most):
    with pytest.raises(UsageError, match=f"take at most {most}"):
        run_ranks(ranks, lambda world: trainee(world, commrt.BackupWorkers(backups)))


NOTHING = SimpleNamespace(schedule=lambda step, ranks: None)


@for_each(
    ("make", "what"),
    [
        (lambda: commrt.BackupWorkers(-1), "give a whole number from 0 on"),
        (lambda: commrt.BackupWorkers(1, NOTHING).schedule(0, 3), "returned None: return"),
        (lambda: commrt.BackupWorkers(1, commrt.Gossip()), "no all-reduce"),
        (lambda: commrt.BackupWorkers(1, commrt.Ring), "makes no schedules"),
    ],
)
def test_backup_workers_that_cannot_work_are_refused(make, what):
    with pytest.raises(UsageError, match=what):
        make()


def test_a_world_whose_ranks_cannot_connect_again_is_refused():
    def connect(store, ranks, timeout_s):
        return over_threads(store, ranks, timeout_s)

    with pytest.raises(UsageError, match=r"needs ranks that can connect again: use commrt.init\(\)"):
        run_ranks(3, lambda world: trainee(world, commrt.BackupWorkers(1)), connect=connect)


BACKED = commrt.BackupWorkers(0)


@for_each(("first", "second"), [(BACKED, commrt.Ring()), (commrt.Gossip(), BACKED)])
@on_ranks(2)
def test_another_model_in_the_same_world_is_refused(world, first, second):
    replica = trainee(world, first)[2]
    with pytest.raises(UsageError, match=r"another model|attached to this world"):
        trainee(world, second)
    replica.detach()


@on_ranks(3)
def test_a_closure_is_refused(world):
    _, optimizer, _ = trainee(world, commrt.BackupWorkers(1))
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 0.0)
