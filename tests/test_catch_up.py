# SPDX-License-Identifier: Apache-2.0
"""A late rank takes weights, buffers, schedulers and optimizers from the others."""

import threading
import time
from copy import deepcopy
from random import Random
from types import SimpleNamespace

import pytest
import torch
from cases import for_each
from late_ranks import (
    AT,
    LATE,
    MODEL,
    NORMED,
    Loop,
    Trainee,
    all_are_equal,
    at,
    backward,
    batch,
    on_loop,
    sgd,
    trainee,
    weights,
)
from torch import nn
from torch.distributed import HashStore
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import commrt
from commrt.backup_workers.backup_replica import BackupWorkersReplica
from commrt.backup_workers.catch_up import CatchUp
from commrt.backup_workers.replica_state import ReplicaState, Snapshot, unpack
from commrt.elastic.state_server import StateServer
from commrt.errors import DisagreementError, Evicted, Place, QuorumLost, UsageError
from commrt.runtime.generation import Generation
from commrt.testing.ranks import run_ranks
from commrt.training.gradient_weights import GradientWeights
from commrt.training.riding import Riding


def averaged(loop, world):
    """A rank with batch norm, AdamW, a scheduler and an average of its weights."""
    model = nn.Sequential(deepcopy(MODEL), nn.BatchNorm1d(3).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler, average = ExponentialLR(optimizer, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    rank = Trainee(loop, world, model, optimizer, also=[scheduler, average])
    rank.scheduler, rank.average = scheduler, average
    return rank


def test_a_rank_that_catches_up_copies_schedulers_weight_averages_and_buffers():
    def body(loop, world):
        rank = averaged(loop, world)

        def update():
            rank.average.update_parameters(rank.model)
            rank.scheduler.step()

        rank.train(update)
        assert int(rank.average.n_averaged) == rank.scheduler.last_epoch == 8
        tensors = *rank.average.state_dict().values(), *rank.model.state_dict().values()
        return [torch.tensor(rank.scheduler.get_last_lr()), *(tensor.clone() for tensor in tensors)]

    assert all_are_equal(Loop(late_by=4).run(body))


def test_a_scheduler_that_was_not_named_in_also_is_an_error():
    def body(loop, world):
        """Train until one rank has left and both others must count."""
        rank = Trainee(loop, world)
        scheduler = CosineAnnealingLR(rank.optimizer, 30)
        try:
            while at(rank.replica) < 20 and (world.rank or rank.replica.step < AT + 4):
                rank.step()
                scheduler.step()
        finally:
            loop.progress.tell(20)  # nobody need wait for who has failed

    with pytest.raises(DisagreementError, match="settings"):
        Loop(3, late_by=3).run(body)


@for_each(("ranks", "collective_first"), [(3, False), (4, True)])
def test_schedulers_and_averages_count_each_update_once_on_either_side_of_a_collective(ranks, collective_first):
    def body(world):
        model, rng = deepcopy(MODEL), Random(world.rank)
        optimizer = sgd(model)
        scheduler, average = ExponentialLR(optimizer, 0.9), AveragedModel(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world, also=[scheduler, average])
        for _ in range(12):
            threading.Event().wait(rng.choice([0.002, 0.02]))  # computes for so long, so that others are late each time
            backward(model, world.rank, replica.step)
            optimizer.step()
            if collective_first:
                world.all_reduce(torch.ones(2))
            scheduler.step()
            average.update_parameters(model)
            if not collective_first:
                world.all_reduce(torch.ones(2))
        replica.consolidate()
        return replica.step, scheduler.last_epoch, int(average.n_averaged)

    ends = run_ranks(ranks, body)
    assert ends == [(ends[0][0],) * 3] * ranks


@on_loop(averaged, late_by=3)
def test_a_rank_reads_its_step_anywhere_and_its_own_averages_count_once(rank):
    replica = rank.replica
    while replica.step < 8:
        rank.backward()
        assert replica.step >= replica.last.step
        rank.optimizer.step()
        assert replica.step >= replica.last.step
        rank.average.update_parameters(rank.model)
        rank.tell()
    replica.drain()
    assert (int(rank.average.n_averaged), replica.step) == (8, 8)


class Parts(nn.ModuleList):
    """What is called is not the module that was attached."""

    def __init__(self):
        super().__init__(deepcopy(MODEL))
        self.call = [nn.Sequential(*self)]


def test_a_model_whose_hooks_are_not_called_takes_its_schedulers_from_others_once():
    def body(loop, world):
        model = Parts()
        optimizer = sgd(model)
        scheduler = ExponentialLR(optimizer, 0.9)
        rank = Trainee(loop, world, model, optimizer, also=[scheduler])
        replica, reports = rank.replica, []
        while replica.step < loop.steps:
            if replica.step == 0 and rank.rank != LATE:
                loop.wait_for_who_is_late()
            elif replica.step == 0:  # later another may be late too, and wait for these to train
                loop.late_is_there.set()
                loop.progress.wait_for(loop.late_by)
            optimizer.zero_grad()
            model.call[0](batch(rank.rank, replica.step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            reports.append(replica.last)
            rank.tell()
        replica.consolidate()
        return (scheduler.last_epoch, optimizer.param_groups[0]["lr"]), weights(model), reports[:2]

    ends = Loop(3, late_by=2).run(body)
    assert len({scheduled for scheduled, *_ in ends}) == 1
    assert all_are_equal([found for _, found, _ in ends])
    late, older = ends[LATE][2]
    assert (late.counted, late.step, late.members) == (False, 0, (0, 1))
    assert older == commrt.training.StepReport(older.step, (), 0.0, (), counted=False)  # of weights that were replaced


class Renormed(nn.Linear):
    def forward(self, x):
        self.weight.data.renorm_(2, 0, 0.3)
        return super().forward(x)


with torch.random.fork_rng():
    torch.manual_seed(0)
    RENORMED = nn.Sequential(Renormed(5, 6), nn.Tanh(), Renormed(6, 2)).double()


def with_own_buffers(loop, world):
    return Trainee(loop, world, deepcopy(NORMED), broadcast_buffers=False)


@on_loop(with_own_buffers, late_by=4)
def test_buffers_that_are_not_broadcast_are_copied_from_the_source_rank(rank):
    rank.train()
    assert int(rank.model[1].num_batches_tracked) >= 8


@on_loop()
def test_weights_swapped_in_for_evaluation_are_not_sent(rank):
    @torch.no_grad()
    def evaluate():
        kept = deepcopy(rank.model.state_dict())
        for param in rank.model.parameters():
            param.zero_()
        rank.model.eval()
        rank.model(batch(0, 0))
        rank.model.train()
        rank.model.load_state_dict(kept)

    rank.train(evaluate)
    assert rank.replica.replicas_equal()


@on_loop(lambda loop, world: Trainee(loop, world, deepcopy(RENORMED)))
def test_weights_that_a_forward_pass_changes_are_sent_and_consolidated(rank):
    rank.train()
    if rank.rank == 1:
        rank.model(batch(0, 0))
    rank.replica.consolidate()
    assert rank.replica.replicas_equal()


@on_loop(late_by=3)
def test_a_layer_that_is_frozen_during_training_is_copied_unchanged(rank):
    rank.train(until=AT - 1)
    rank.model[0].requires_grad_(requires_grad=False)
    rank.train()
    assert rank.replica.replicas_equal()


def test_weights_changed_between_two_passes_of_a_step_are_not_sent():
    def body(loop, world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        while at(replica) < loop.steps:
            if world.rank == LATE and replica.step == 0:  # later another may be late too, and find no whole weights
                loop.progress.wait_for(1)
            with replica.no_sync():
                backward(model, world.rank, replica.step)
            where = weights(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=0.1)
            backward(model, world.rank, replica.step)
            with torch.no_grad():
                for param, value in zip(model.parameters(), where, strict=True):
                    param.copy_(value)
            optimizer.step()
            loop.progress.tell_of(replica)
        replica.consolidate()
        return replica.stats().counted, weights(model)

    ends = Loop().run(body)
    assert ends[LATE][0] < 8
    assert all_are_equal([found for _, found in ends])


def test_a_state_that_became_that_of_another_rank_is_not_given_as_its_own_of_before():
    state = ReplicaState(model := torch.nn.Linear(2, 2), [*model.parameters()], [])
    state.open(Snapshot(1, 0, None, 1, in_pass=True, is_due=False, stopping=[]))
    state.install(unpack([*state.give(1, 0.0)][1]), amid_step=False)
    assert [*state.give(1, 0.0)] == []


def test_a_forward_pass_between_backward_and_step_sends_no_weights_of_another_version():
    def body(world):
        model, optimizer, replica = trainee(world, commrt.BackupWorkers(1))
        backward(model, world.rank, 0)
        with torch.no_grad():
            model(batch(world.rank, 0))
        counted, early = replica.last.counted, [*replica._state.give(1, 0.0)]
        optimizer.step()
        model(batch(world.rank, 1))
        return counted, bool(early), bool([*replica._state.give(1, 0.0)])

    for counted, early, then in run_ranks(4, body):
        assert then
        assert not (counted and early)


class Rounding(torch.optim.SGD):
    """Remembers where it was in single precision; the weights are in double."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["rounded"] = param.detach().float()


def with_rounded(loop, world):
    model = deepcopy(MODEL)
    return Trainee(loop, world, model, Rounding(model.parameters(), lr=0.05))


@on_loop(with_rounded)
def test_optimizers_keep_the_dtype_of_what_they_remember(rank):
    rank.train()
    assert {state["rounded"].dtype for state in rank.optimizer.state.values()} == {torch.float32}


class Unsendable:
    def state_dict(self):
        return {"state": torch.nn.Linear}

    def load_state_dict(self, state):
        raise AssertionError


def test_state_that_others_could_not_load_is_refused_at_once():
    with pytest.raises(UsageError, match="cannot be sent to other ranks"):
        run_ranks(3, lambda world: trainee(world, commrt.BackupWorkers(1), also=[Unsendable()]))


def late_of(timeout_s, members, current=int):
    """Return a world and a membership of rank 2, as `CatchUp` asks them."""
    member = SimpleNamespace(gone=set, current=current)
    elastic = SimpleNamespace(require_open=int, generation=Generation(1, dict.fromkeys(members, 0)), member=member)
    options = SimpleNamespace(towards="127.0.0.1")
    return SimpleNamespace(rank=2, timeout_s=timeout_s, config=None, reconnect_options=options), elastic


def gone():
    raise Evicted("it did not come to consolidate() within 2 s", Place(2), 1, 0)


@for_each(
    ("current", "kind", "says"),
    [
        (int, QuorumLost, r"only ranks \[0, 1\] had the weights of step 3, and they are gone"),
        (gone, Evicted, "it did not come to consolidate"),
    ],
    ids=["a member", "evicted"],
)
def test_a_late_rank_whose_sources_are_gone_is_told_so_unless_it_was_evicted_meanwhile(current, kind, says):
    catch_up = CatchUp(*late_of(60.0, (2, 3), current), None, None, Riding(2, GradientWeights(())))
    catch_up.close()
    with pytest.raises(kind, match=says):
        catch_up.fetch(3, [0, 1])


def test_a_source_that_stops_as_it_copies_is_left_for_another_long_before_its_limit(monkeypatch):
    monkeypatch.setattr("commrt.backup_workers.catch_up.unpack", bytes)
    over, store = threading.Event(), HashStore()

    def stops(_):
        yield b""
        over.wait(60.0)

    sources = [
        StateServer("127.0.0.1", stops),
        StateServer("127.0.0.1", lambda _: (piece for piece in (b"", b"state"))),
    ]
    for rank, source in enumerate(sources):
        store.set(f"service/{rank}", source.address)
    catch_up = CatchUp(*late_of(60.0, members=(0, 1, 2)), store, None, Riding(2, GradientWeights(())))
    begin_s = time.monotonic()
    assert catch_up.fetch(3, [0, 1]) == b"state"
    assert time.monotonic() - begin_s < 15.0  # 30 if it may take as long as any copy
    over.set()
    for served in (catch_up, *sources):
        served.close()


@for_each(
    ("members", "asked"),
    [
        ((0, 1, 2, 3), {4: [0, 1, 2, 3], 5: [1, 2, 3, 0]}),
        ((2, 5), {0: [2, 5], 1: [5, 2], 3: [2, 5], 4: [5, 2]}),
        ((), {0: [1, 2, 3, 4, 5], 2: [3, 4, 5, 0, 1], 5: [0, 1, 2, 3, 4]}),
        ((2,), {2: [3, 4, 5, 0, 1]}),  # a process of this rank before this one
    ],
)
def test_ranks_that_are_late_together_ask_different_sources_first(members, asked):
    replicas = {rank: SimpleNamespace(_world=SimpleNamespace(rank=rank, size=6)) for rank in asked}
    for replica in replicas.values():
        BackupWorkersReplica._need(replica, 1, members)
    assert {rank: replica._sources for rank, replica in replicas.items()} == asked
