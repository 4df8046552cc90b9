# SPDX-License-Identifier: Apache-2.0
"""Training with backup workers: exactly N gradients of the right weights, whoever is late, and equal replicas."""

from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import commrt
from commrt.errors import DeadlineExceeded, DisagreementError, Place, QuorumLost, UsageError
from commrt.membership import quorum_vote
from commrt.replicas.arrears import Arrears
from commrt.testing.ranks import run_ranks

LIMIT_S = 30.0


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()


with torch.random.fork_rng():
    MODEL = made()
    NORMED = nn.Sequential(deepcopy(MODEL).float(), nn.BatchNorm1d(3), nn.Linear(3, 2))


def batch(rank, version):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * version + rank), dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model, rank, version):
    model.zero_grad()
    model(batch(rank, version)).square().mean().backward()


def attached(world, algorithm):
    model = deepcopy(MODEL)
    return commrt.attach(model, sgd(model), algorithm, world=world)


def at(replica):
    """The version of the weights that the next forward pass uses."""
    replica.drain()
    return replica.step


@dataclass
class Progress:
    """How far the ranks of a test have come, so that one can be late without anybody sleeping."""

    passed: int = 0  # steps that somebody has passed
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self, step):
        with self.changed:
            self.passed = max(self.passed, step)
            self.changed.notify_all()

    def wait_for(self, step):
        with self.changed:
            assert self.changed.wait_for(lambda: self.passed >= step, LIMIT_S)


def trained(world, algorithm, steps, progress, lateness, **options):
    """Trains until the weights have seen `steps` updates; late by ``lateness(rank, version)`` steps where not None."""
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, algorithm, world=world, bucket_cap_mb=1e-4, **options)
    used = {}
    while (version := at(replica)) < steps:
        late = lateness(world.rank, version)
        if late is not None:
            progress.wait_for(min(version + late, steps))
        backward(model, world.rank, version)
        optimizer.step()
        if replica.last.counted:
            used[replica.last.step] = replica.last.members
        progress.tell(replica._backing.version)
    return used, [param.detach().clone() for param in model.parameters()], replica.replicas_equal()


def reference(steps, used):
    """The same steps in one process, with the gradients that were counted."""
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    for step in range(steps):
        gradients = []
        for rank in used[step]:
            backward(model, rank, step)
            gradients.append([param.grad.clone() for param in model.parameters()])
        for param, *parts in zip(model.parameters(), *gradients, strict=True):
            param.grad = sum(parts) / len(parts)
        optimizer.step()
    return list(model.parameters())


def check(ends, steps, needed):
    used = {}
    for mine, _, equal in ends:
        assert equal
        for step, members in mine.items():
            assert used.setdefault(step, members) == members
    assert sorted(used) == list(range(steps))
    assert all(len(members) == needed for members in used.values())
    for step, members in used.items():  # all whom the others counted know it, and nobody else does
        assert {rank for rank, (mine, _, _) in enumerate(ends) if step in mine} == set(members)
    for (_, params, _), wanted in ((end, reference(steps, used)) for end in ends):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(params, wanted, strict=True))


@settings(max_examples=6)
@given(st.data())
def test_whoever_is_late_exactly_n_gradients_of_the_right_weights_count_and_all_end_equal(data):
    ranks = data.draw(st.integers(3, 7))
    backups = data.draw(st.integers(1, (ranks - 1) // 2))
    steps, early = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    inner = data.draw(st.sampled_from([commrt.Torus2D(), commrt.Ring(), commrt.HalvingDoubling()]))
    places = st.tuples(st.integers(0, ranks - 1), st.integers(0, steps - 1))
    late = data.draw(st.dictionaries(places, st.integers(1, 9), max_size=30))
    progress, may = Progress(), threading.Semaphore(backups)

    def lateness(rank, version):
        """As drawn, but never more than there are backups at once."""
        if (rank, version) not in late or not may.acquire(blocking=False):
            return
        progress.wait_for(min(version + late[rank, version], steps))
        may.release()
        return

    algorithm = commrt.BackupWorkers(backups, inner, early)
    check(run_ranks(ranks, lambda world: trained(world, algorithm, steps, progress, lateness)), steps, ranks - backups)


@pytest.mark.parametrize("options", [{}, {"wire": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_without_backups_the_result_is_that_of_plain_averaging_bit_for_bit(ranks, early, options):
    def one(world, algorithm):
        model = deepcopy(NORMED)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, algorithm, world=world, **{"bucket_cap_mb": 1e-4, **options})
        for step in range(6):
            optimizer.zero_grad()
            model(batch(world.rank, step).float()).square().mean().backward()
            optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    inner = commrt.Torus2D()
    plain = run_ranks(ranks, lambda world: one(world, inner))
    backed = run_ranks(ranks, lambda world: one(world, commrt.BackupWorkers(0, inner, early)))
    for ours, theirs in zip(backed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


LATE, AT = 2, 3
"""Who is late in most tests, and in which step."""


class Loop:
    """A training loop of which one rank is late once; `each` is called after every backward pass."""

    def __init__(self, ranks=4, algorithm=None, late_by=1, steps=8):
        self.ranks, self.algorithm, self.steps = ranks, algorithm or commrt.BackupWorkers(1), steps
        self.progress, self.late_by, self.late_is_there = Progress(), late_by, threading.Event()

    def wait(self, world, replica):
        """The rank that is late waits here until the others are gone; they, that it has not been left behind before."""
        if at(replica) != AT:
            return
        if world.rank == LATE:
            self.late_is_there.set()
            self.progress.wait_for(AT + self.late_by)
        else:  # in the forward pass, where this rank's state may be copied by who was left behind
            replica.model.register_forward_pre_hook(self.wait_for_who_is_late)

    def wait_for_who_is_late(self, *_):
        assert self.late_is_there.wait(LIMIT_S)

    def train(self, world, replica, optimizer):
        while at(replica) < self.steps:
            self.wait(world, replica)
            optimizer.zero_grad()
            replica.model(batch(world.rank, replica.step).float()).square().mean().backward()
            optimizer.step()
            self.progress.tell(replica._backing.version)

    def run(self, body):
        return run_ranks(self.ranks, lambda world: body(self, world))


def test_a_late_gradient_is_zeroed_its_step_changes_nothing_and_the_report_says_so():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        seen = None
        while at(replica) < loop.steps:
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            if world.rank == LATE and replica.last.step == AT:
                before = [param.detach().clone() for param in model.parameters()]
                zeros = all(not param.grad.any() for param in model.parameters())
                optimizer.step()
                same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
                seen = replica.last, zeros, same, all(param.grad is not None for param in model.parameters())
            else:
                optimizer.step()
            loop.progress.tell(replica._backing.version)
            if seen is None and replica.last.step == AT:
                seen = replica.last
        return seen, replica.stats()

    ends = Loop().run(body)
    (late, zeros, same, kept), stats = ends[LATE]
    assert zeros, "a gradient that came too late was left"
    assert same, "a gradient that came too late was stepped with"
    assert kept, "who looks at gradients finds None"
    assert (late.counted, late.members, late.dropped) == (False, (0, 1, 3), (LATE,))
    assert late.late_s > 0
    assert late.samples == 12
    assert stats.counted < stats.steps
    assert stats.late_s >= late.late_s
    counted, _ = ends[0]
    assert (counted.counted, counted.members, counted.dropped, counted.late_s) == (True, (0, 1, 3), (LATE,), 0.0)


def test_who_catches_up_takes_schedulers_averages_of_weights_and_buffers_along():
    def body(loop, world):
        model = nn.Sequential(deepcopy(MODEL), nn.BatchNorm1d(3).double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, also=[scheduler, average])
        while at(replica) < loop.steps:
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            optimizer.step()
            average.update_parameters(model)
            scheduler.step()
            loop.progress.tell(replica._backing.version)
        replica.drain()
        kept = [tensor.clone() for tensor in (*average.state_dict().values(), *model.state_dict().values())]
        return scheduler.last_epoch, scheduler.get_last_lr(), kept, replica.last.step

    ends = Loop(late_by=4).run(body)
    for epoch, rates, kept, _ in ends:
        assert epoch == 8
        assert rates == ends[0][1]
        assert all(torch.equal(a, b) for a, b in zip(kept, ends[0][2], strict=True))


@pytest.mark.parametrize("at_the_top", [False, True])
def test_schedulers_may_be_stepped_anywhere_between_two_passes(at_the_top):
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, also=[scheduler])
        try:
            while at(replica) < 20 and (world.rank or replica.step < AT + 4):  # then the other two must count
                if at_the_top and replica.step:
                    scheduler.step()
                loop.wait(world, replica)
                backward(model, world.rank, replica.step)
                optimizer.step()
                if not at_the_top:
                    scheduler.step()
                loop.progress.tell(replica._backing.version)
        finally:
            loop.progress.tell(20)
        return scheduler.last_epoch + at_the_top

    assert Loop(3, late_by=3).run(body)[1:] == [20, 20]


def test_a_forward_pass_between_backward_and_step_gives_nobody_weights_of_another_version():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        backward(model, world.rank, 0)
        with torch.no_grad():
            model(batch(world.rank, 0))
        counted, early = replica.last.counted, replica._donor.give(1, 0.0)
        optimizer.step()
        model(batch(world.rank, 1))
        return counted, early is not None, replica._donor.give(1, 0.0) is not None

    for counted, early, then in run_ranks(4, body):
        assert then
        assert not (counted and early)


def test_a_scheduler_that_was_not_named_is_found_out():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        try:
            while at(replica) < 20 and (world.rank or replica.step < AT + 4):  # then the other two must count
                loop.wait(world, replica)
                backward(model, world.rank, replica.step)
                optimizer.step()
                scheduler.step()
                loop.progress.tell(replica._backing.version)
        finally:
            loop.progress.tell(20)  # nobody need wait for who has failed

    with pytest.raises(DisagreementError, match="settings"):
        Loop(3, late_by=3).run(body)


def test_a_grad_scaler_that_met_an_infinity_while_a_rank_was_late_is_the_same_everywhere():
    def body(loop, world):
        model = deepcopy(MODEL).float()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, also=[scaler])
        scales = {}
        while at(replica) < loop.steps:
            version = replica.step
            loop.wait(world, replica)
            optimizer.zero_grad()
            loss = model(batch(world.rank, version).float()).square().mean()
            scale = scaler.get_scale()
            scaler.scale(loss * (float("inf") if version == AT else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if replica.last.counted:
                scales[version] = scale
            loop.progress.tell(replica._backing.version)
        return scales, replica.replicas_equal()

    ends = Loop(late_by=1).run(body)
    for scales, equal in ends:
        assert equal
        assert all(scales[version] == ends[0][0].get(version, scales[version]) for version in scales)


def test_buffers_that_are_not_broadcast_are_taken_as_the_donor_has_them():
    def body(loop, world):
        model = deepcopy(NORMED)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, broadcast_buffers=False)
        loop.train(world, replica, optimizer)
        return int(model[1].num_batches_tracked)

    assert all(tracked >= 8 for tracked in Loop(late_by=4).run(body))


def test_evaluating_with_other_weights_gives_them_to_nobody():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        while at(replica) < loop.steps:
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            optimizer.step()
            loop.progress.tell(replica._backing.version)
            kept = deepcopy(model.state_dict())
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
                model.eval()
                model(batch(0, 0))
                model.train()
            model.load_state_dict(kept)
        return replica.replicas_equal()

    assert all(Loop().run(body))


def test_a_rank_reads_its_step_anywhere_and_its_own_schedulers_count_once():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, also=[average])
        while replica.step < loop.steps:
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            assert replica.step >= replica.last.step
            optimizer.step()
            assert replica.step >= replica.last.step
            average.update_parameters(model)
            loop.progress.tell(replica._backing.version)
        replica.drain()
        return int(average.n_averaged), replica.step

    for averaged, step in Loop(late_by=3).run(body):
        assert averaged == step == 8


def test_batches_dropped_at_the_end_of_an_epoch_leave_no_trace():
    def body(world):
        model = deepcopy(NORMED)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world, also=[scheduler])
        for _ in range(3):
            for _ in range(9 if world.rank == LATE else 4):
                optimizer.zero_grad()
                model(batch(world.rank, replica.step).float()).square().mean().backward()
                optimizer.step()
                scheduler.step()
            assert replica.replicas_equal()
        return scheduler.last_epoch, replica.step

    for epochs, step in run_ranks(4, body):
        assert epochs == step


def test_optimizers_keep_the_dtype_of_what_they_remember():
    class Master(torch.optim.SGD):
        """With weights in double precision beside."""

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                master = self.state[param].setdefault("master", param.detach().double())
                if param.grad is not None:
                    master -= 0.01 * param.grad.double()
                    param.copy_(master)

    def body(loop, world):
        model = deepcopy(MODEL).float()
        optimizer = Master(model.parameters())
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        loop.train(world, replica, optimizer)
        return {state["master"].dtype for state in optimizer.state.values()}

    assert all(dtypes == {torch.float64} for dtypes in Loop().run(body))


def test_state_that_others_could_not_load_is_refused_at_once():
    class Random:
        def state_dict(self):
            return {"state": torch.nn.Linear}

        def load_state_dict(self, state):
            raise AssertionError

    def body(world):
        model = deepcopy(MODEL)
        commrt.attach(model, sgd(model), commrt.BackupWorkers(1), world=world, also=[Random()])

    with pytest.raises(UsageError, match="cannot be sent to other ranks"):
        run_ranks(3, body)


def test_a_world_can_be_closed_after_a_backward_pass_that_did_not_end():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, commrt.BackupWorkers(0, early=True), world=world, bucket_cap_mb=1e-4)

        def fail(_):
            raise OnPurposeError

        model[0].weight.register_hook(fail)
        with pytest.raises(OnPurposeError):
            backward(model, world.rank, 0)
        world.close()
        return True

    assert all(run_ranks(2, body))


def test_a_rank_that_was_away_for_longer_than_the_store_remembers_comes_back(monkeypatch):
    monkeypatch.setattr(quorum_vote, "KEPT", 4)
    monkeypatch.setattr(quorum_vote, "TIDIED", 2)
    steps = 40
    progress = Progress()
    ends = run_ranks(
        4,
        lambda world: trained(
            world, commrt.BackupWorkers(1), steps, progress, lambda rank, v: 30 if (rank, v) == (LATE, AT) else None
        ),
    )
    check(ends, steps, 3)


def test_gradients_that_were_accumulated_are_dropped_or_counted_together():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        counts = {}
        while (version := at(replica)) < loop.steps:
            optimizer.zero_grad()
            with replica.no_sync():
                model(batch(world.rank, version)).square().mean().backward()
            loop.wait(world, replica)
            model(batch(world.rank + 50, version)).square().mean().backward()
            optimizer.step()
            counts[replica.last.step] = replica.last.samples
            loop.progress.tell(replica._backing.version)
        return counts, replica.replicas_equal()

    for counts, equal in Loop().run(body):
        assert equal
        assert set(counts.values()) == {24}


@pytest.mark.parametrize("batches", [(9, 9, 9, 5), (9, 9, 4, 4), (3, 9, 9, 30)], ids=str)
def test_ranks_that_run_out_of_data_are_absent_and_nobody_waits_for_them(batches):
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
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


def test_a_second_epoch_after_what_all_do_together_needs_no_special_call():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        for epoch in range(3):
            for _ in range(4 + (world.rank + epoch) % 3):
                backward(model, world.rank, replica.step)
                optimizer.step()
            score = torch.ones(8)
            world.run(commrt.Ring().schedule(0, world.size), score)
            assert score[0] == world.size
        replica.consolidate()
        return replica.replicas_equal()

    assert all(run_ranks(4, body))


def test_nobody_waits_for_a_silent_rank_to_fill_a_step_while_others_wait_in_a_call_of_all():
    progress, all_are_dropped = Progress(), threading.Event()

    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        if world.rank == LATE:
            progress.wait_for(1)
        for _ in range(20 if world.rank == LATE else 1):
            backward(model, world.rank, replica.step)
            optimizer.step()
        if world.rank == LATE:
            all_are_dropped.set()
        progress.tell(1)
        if world.rank == 1:
            all_are_dropped.wait(LIMIT_S)  # silent: it says that it trains
        replica.consolidate()
        return replica.step, replica.replicas_equal()

    assert run_ranks(3, body, timeout_s=4.0) == [(1, True)] * 3


@pytest.mark.parametrize("timeout_s", [0.8, 4.0])
def test_a_late_rank_that_the_others_wait_for_in_a_call_of_all_comes_to_it_however_short_their_deadline_is(timeout_s):
    progress = Progress()

    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        if world.rank == LATE:
            progress.wait_for(2)
        for _ in range(2):  # the late rank's second batch is of a step that nobody else comes to
            backward(model, world.rank, replica.step)
            optimizer.step()
        progress.tell(2)
        replica.consolidate()
        return replica.step, replica.replicas_equal()

    assert run_ranks(4, body, timeout_s=timeout_s) == [(2, True)] * 4


def test_a_batch_that_was_dropped_is_given_out_again_until_it_counts():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        counted, given_out = [], []
        for number in commrt.reissued(range(6), replica):
            given_out.append(number)
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            optimizer.step()
            loop.progress.tell(replica._backing.version)
            if replica.last.counted:
                counted.append(number)
        return counted, given_out, replica.last.ended

    for counted, given_out, ended in Loop().run(body):
        assert counted == list(range(len(counted)))
        assert ended or counted == list(range(6))
        assert len(given_out) >= len(counted)


def test_batches_of_one_accumulation_are_given_out_again_together():
    class Reported:
        last = None

    replica, seen = Reported(), []
    fates = iter([True, False, True])
    for number, each in enumerate(commrt.reissued("abcd", replica)):
        seen.append(each)
        if number % 2:
            replica.last = commrt.StepReport(0, (), 0.0, (), counted=next(fates, True))
    assert "".join(seen) == "abcdcd"


def test_a_checkpoint_is_gone_on_from_with_old_numbers():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)

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


def test_one_rank_alone_is_legal():
    with commrt.init() as world:
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        backward(model, 0, 0)
        optimizer.step()
        assert replica.step == 1
        replica.close()


@pytest.mark.parametrize(("ranks", "backups", "most"), [(2, 1, 0), (3, 2, 1), (4, 2, 1), (5, 3, 2)], ids=str)
def test_as_many_backups_as_members_are_refused(ranks, backups, most):
    with pytest.raises(UsageError, match=f"take at most {most}"):
        run_ranks(
            ranks, lambda world: commrt.attach(m := deepcopy(MODEL), sgd(m), commrt.BackupWorkers(backups), world=world)
        )


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: commrt.BackupWorkers(-1), "no number of ranks"),
        (lambda: commrt.BackupWorkers(1.5), "no number of ranks"),
        (lambda: commrt.BackupWorkers(True), "no number of ranks"),
        (lambda: commrt.BackupWorkers(1, commrt.Gossip()), "no all-reduce"),
        (lambda: commrt.BackupWorkers(1, commrt.BackupWorkers(1)), "no all-reduce"),
        (lambda: commrt.BackupWorkers(1, commrt.Ring), "makes no schedules"),
    ],
)
def test_backup_workers_that_cannot_work_are_refused(make, what):
    with pytest.raises(UsageError, match=what):
        make()


def test_without_an_optimizer_there_is_nothing_to_catch_up_with():
    with pytest.raises(UsageError, match="needs the optimizers"):
        run_ranks(3, lambda world: commrt.attach(deepcopy(MODEL), None, commrt.BackupWorkers(1), world=world))


@pytest.mark.parametrize("first", [commrt.BackupWorkers(1), commrt.Ring(), commrt.Gossip()], ids=str)
def test_another_model_in_the_same_world_is_refused(first):
    def body(world):
        one, other = deepcopy(MODEL), deepcopy(MODEL)
        replica = commrt.attach(one, sgd(one), first, world=world)
        second = commrt.Ring() if isinstance(first, commrt.BackupWorkers) else commrt.BackupWorkers(1)
        with pytest.raises(UsageError, match=r"another model|attached to this world"):
            commrt.attach(other, sgd(other), second, world=world)
        replica.detach()
        return True

    assert all(run_ranks(3, body))


def test_a_closure_is_refused():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        commrt.attach(model, optimizer, commrt.BackupWorkers(1), world=world)
        with pytest.raises(UsageError, match="closure"):
            optimizer.step(lambda: 0.0)
        return True

    assert all(run_ranks(3, body))


class OnPurposeError(Exception):
    """What ends a rank in these tests."""


def left_to_die(world, algorithm, dying, gone, steps, saved):
    """Trains; a rank dies at the first step of its own that is not before `dying[rank]`, and nobody is further then."""
    model = deepcopy(MODEL)
    optimizer = sgd(model)
    replica = commrt.attach(model, optimizer, algorithm, world=world)
    replica.before_giving_up(lambda: saved.append((world.rank, replica.step)))
    while at(replica) < steps:
        if replica.step >= dying.get(world.rank, steps):
            raise OnPurposeError
        backward(model, world.rank, replica.step)  # its forward pass gives weights to those who are late
        for rank in dying:
            assert replica.step <= dying[rank] or gone[rank].wait(30), f"rank {rank} did not die"
        optimizer.step()
    return replica.replicas_equal(), [loss.rank for loss in replica.lost]


def outcomes(ranks, algorithm, dying, saved):
    """What each rank returned or raised in nine steps."""
    gone = {rank: threading.Event() for rank in dying}

    def one(world):
        try:
            return left_to_die(world, algorithm, dying, gone, 9, saved)
        except Exception as error:  # what it is, the test looks at
            world.abort(error)
            gone.get(world.rank, threading.Event()).set()
            return error

    return run_ranks(ranks, one)


@pytest.mark.parametrize("backups", [1, 2])
def test_as_many_ranks_as_there_are_backups_may_die(backups):
    dying = {1: 3, 4: 5} if backups == 2 else {1: 3}
    ends = outcomes(5, commrt.BackupWorkers(backups), dying, [])
    for rank, end in enumerate(ends):
        if rank in dying:
            assert isinstance(end, OnPurposeError)
        else:
            assert end == (True, sorted(dying))


def test_one_more_that_dies_ends_all_with_a_checkpoint_and_an_error_that_says_who():
    saved = []
    ends = outcomes(5, commrt.BackupWorkers(1), {1: 3, 4: 5}, saved)
    for rank in (0, 2, 3):
        assert isinstance(ends[rank], commrt.TransportError)
        assert isinstance(ends[rank], QuorumLost) or isinstance(ends[rank].__cause__, QuorumLost)
    assert sorted(rank for rank, _ in saved) == [0, 2, 3]
    assert {step for _, step in saved} == {5}


def test_too_few_that_are_left_are_no_loss_where_the_others_have_finished_in_good_order():
    all_are_done = threading.Barrier(4)

    def body(world):
        model = deepcopy(MODEL)
        replica = commrt.attach(model, sgd(model), commrt.BackupWorkers(1), world=world)
        if world.rank > 1:
            replica.detach()
        all_are_done.wait()
        if world.rank < 2:
            world.elastic.recover_now(commrt.PeerLost("made up", Place(world.rank)))
        return tuple(world.members)

    assert run_ranks(4, body)[:2] == [(0, 1), (0, 1)]


def test_a_call_of_all_to_which_the_others_do_not_come_ends_at_its_deadline_though_they_live():
    is_over = threading.Event()

    def body(world):
        model = deepcopy(MODEL)
        replica = commrt.attach(model, sgd(model), commrt.BackupWorkers(1), world=world)
        if world.rank:
            return is_over.wait(30)
        with pytest.raises(DeadlineExceeded):
            replica.replicas_equal()
        is_over.set()
        world.abort(DeadlineExceeded("the test is over"))
        return True

    assert all(run_ranks(3, body, timeout_s=0.5))


def to_the_late_step(loop, world, replica, optimizer):
    """One rank has just dropped its gradient, and the others have stepped with theirs."""

    def step():
        loop.wait(world, replica)
        backward(replica.model, world.rank, replica.step)
        optimizer.step()
        loop.progress.tell(replica._backing.version)

    while at(replica) < AT:
        step()
    step()
    return step


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def all_are_equal(ends):
    return all(torch.equal(*pair) for end in ends for pair in zip(end, ends[0], strict=True))


def test_weights_that_are_others_for_a_while_go_to_nobody_in_a_call_of_all():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        step = to_the_late_step(loop, world, replica, optimizer)
        kept = deepcopy(model.state_dict())
        for param in model.parameters():
            param.data.zero_()
        world.run(commrt.Ring().schedule(0, world.size), torch.ones(8))
        model.load_state_dict(kept)
        was_behind = replica.step > replica._backing.version
        while at(replica) < loop.steps:
            step()
        replica.consolidate()
        return was_behind, weights(model)

    ends = Loop().run(body)
    assert [was_behind for was_behind, _ in ends] == [rank == LATE for rank in range(4)]
    assert all_are_equal([found for _, found in ends])
    assert all(tensor.any() for tensor in ends[LATE][1])


def test_who_has_other_weights_in_takes_none_that_would_be_put_away_again():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        step = to_the_late_step(loop, world, replica, optimizer)
        if world.rank == LATE:
            kept = deepcopy(model.state_dict())
            for param in model.parameters():
                param.data.zero_()
            with pytest.raises(UsageError, match=r"consolidate\(\) first"):
                replica.state_dict()
            model.load_state_dict(kept)
        while at(replica) < loop.steps:
            step()
        replica.consolidate()
        return weights(model)

    assert all_are_equal(Loop().run(body))


def test_a_call_of_all_between_forward_and_backward_takes_from_nobody_the_weights_that_backward_needs():
    """Nobody could give the late one newer weights before its forward pass; they are there when all come together."""

    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        step = to_the_late_step(loop, world, replica, optimizer)
        fetch = replica._relief.fetch
        replica._relief.fetch = lambda due: setattr(replica._relief, "fetch", fetch)
        loss = model(batch(world.rank, replica.step)).square().mean()
        world.all_reduce(loss.detach().clone())
        loss.backward()
        optimizer.step()
        was_counted = replica.last.counted
        while at(replica) < loop.steps:
            step()
        replica.consolidate()
        return was_counted, weights(model)

    ends = Loop().run(body)
    assert not ends[LATE][0]
    assert all_are_equal([found for _, found in ends])


def test_a_late_rank_that_skips_a_batch_after_its_forward_pass_can_be_saved():
    """Nobody could give it newer weights before that pass."""

    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        step = to_the_late_step(loop, world, replica, optimizer)
        fetch = replica._relief.fetch
        replica._relief.fetch = lambda due: setattr(replica._relief, "fetch", fetch)
        model(batch(world.rank, replica.step))
        model.eval()
        saved = replica.state_dict()["step"]
        model.train()
        while at(replica) < loop.steps:
            step()
        replica.consolidate()
        return saved, weights(model)

    ends = Loop().run(body)
    assert ends[LATE][0] == max(saved for saved, _ in ends)
    assert all_are_equal([found for _, found in ends])


def test_weights_that_are_clamped_after_every_step_are_given_in_calls_of_all_too():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)

        def step():
            backward(model, world.rank, replica.step)
            optimizer.step()
            for param in model.parameters():
                param.data.clamp_(-0.1, 0.1)
            loop.progress.tell(replica._backing.version)

        while at(replica) < AT:
            step()
        loop.wait(world, replica)
        step()
        return replica.replicas_equal(), replica.state_dict()["step"]

    assert Loop().run(body) == [(True, AT + 1)] * 4


class Renormed(nn.Linear):
    """Writes to its weights in every forward pass."""

    def forward(self, x):
        self.weight.data.renorm_(2, 0, 0.3)
        return super().forward(x)


def test_weights_that_a_forward_pass_changes_are_given_and_consolidated():
    def body(loop, world):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(Renormed(5, 6), nn.Tanh(), Renormed(6, 2)).double()
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        step = to_the_late_step(loop, world, replica, optimizer)
        while at(replica) < loop.steps:
            step()
        if world.rank == 1:
            model(batch(0, 0))
        replica.consolidate()
        return weights(model)

    assert all_are_equal(Loop().run(body))


def test_weights_that_are_moved_between_two_passes_of_a_step_go_to_nobody():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
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
            loop.progress.tell(replica._backing.version)
        replica.consolidate()
        return replica.stats().counted, weights(model)

    ends = Loop().run(body)
    assert ends[LATE][0] < 8
    assert all_are_equal([found for _, found in ends])


class Parts(nn.ModuleList):
    """What is called is not the module that was attached."""

    def __init__(self):
        super().__init__(deepcopy(MODEL))
        self.call = [nn.Sequential(*self)]


def test_a_model_whose_hooks_are_not_called_takes_its_schedulers_from_others_once():
    def body(loop, world):
        model = Parts()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world, also=[scheduler])
        while replica.step < loop.steps:
            if world.rank == LATE and replica.step == 0:  # later another may be late too, and wait for these to train
                loop.late_is_there.set()
                loop.progress.wait_for(loop.late_by)
            elif replica.step == 0:
                assert loop.late_is_there.wait(LIMIT_S)
            model.zero_grad()
            model.call[0](batch(world.rank, replica.step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            loop.progress.tell(replica._backing.version)
        replica.consolidate()
        return scheduler.last_epoch, optimizer.param_groups[0]["lr"], weights(model)

    ends = Loop(3, late_by=2).run(body)
    assert {epoch for epoch, _, _ in ends} == {ends[0][0]}
    assert {rate for _, rate, _ in ends} == {ends[0][1]}
    assert all_are_equal([found for _, _, found in ends])


def test_a_layer_that_is_frozen_on_the_way_is_handed_on_as_it_is():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        while at(replica) < loop.steps:
            if replica.step >= AT - 1:
                model[0].requires_grad_(requires_grad=False)
            loop.wait(world, replica)
            backward(model, world.rank, replica.step)
            optimizer.step()
            loop.progress.tell(replica._backing.version)
        replica.consolidate()
        return weights(model)

    assert all_are_equal(Loop(late_by=3).run(body))


def test_a_checkpoint_is_what_all_have_whatever_each_had_before():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
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


def test_who_was_late_when_the_others_left_their_last_update_out_is_not_stuck():
    def body(loop, world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, loop.algorithm, world=world)
        while at(replica) < AT:
            backward(model, world.rank, replica.step)
            optimizer.step()
        loop.wait(world, replica)
        backward(model, world.rank, replica.step)  # and no step: its norm is too large
        loop.progress.tell(replica._backing.version)
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


def test_a_step_with_gradients_from_before_consolidate_is_refused():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        replica = commrt.attach(model, optimizer, commrt.BackupWorkers(0), world=world)
        backward(model, world.rank, 0)
        replica.consolidate()
        with pytest.raises(UsageError, match="with gradients from before consolidate"):
            optimizer.step()
        backward(model, world.rank, 1)
        optimizer.step()
        return replica.replicas_equal()

    assert all(run_ranks(2, body))


def test_what_goes_along_must_be_a_list():
    def body(world):
        model = deepcopy(MODEL)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with pytest.raises(UsageError, match=r"attach\(also=\) takes a list, not a ExponentialLR: put it into one"):
            commrt.attach(model, optimizer, commrt.BackupWorkers(0), world=world, also=scheduler)

    run_ranks(2, body)


def test_who_can_never_be_helped_is_told_why():
    world = SimpleNamespace(rank=2, timeout_s=60.0)
    arrears = Arrears([], None, None, world)
    arrears.owe(3, [0, 1], turn=1)
    arrears.remain()
    world.timeout_s = -1e9  # it has been asked again, and the deadline is over
    arrears._asked_s = float("inf")
    with pytest.raises(UsageError, match=r"rank 2 was late, .* call consolidate\(\) on all ranks before"):
        arrears.remain()
