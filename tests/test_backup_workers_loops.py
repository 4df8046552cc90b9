# SPDX-License-Identifier: Apache-2.0
"""Backup workers under loops that do more than step: teachers, buffers of their own, skipped batches, other weights."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from copy import deepcopy

import pytest
import torch
from cases import for_each
from torch import nn

import commrt
from commrt.backup_workers.catch_up import FinalCalls
from commrt.errors import DeadlineExceeded, PeerLost, Place, QuorumLost, UsageError
from commrt.testing.processes import free_port
from commrt.testing.ranks import run_ranks
from commrt.training.model_state import dump, load

LATE, LATE_AT, STEPS, LIMIT_S = 2, 3, 6, 30.0
PLACE = Place(0)


class Net(nn.Module):
    """Has what loops change by themselves: a frozen teacher, and a flag among the buffers."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.register_buffer("observes", torch.ones(1, dtype=torch.uint8))

    def forward(self, x):
        return (self.student(x) - self.teacher(x)).square().mean() + self.student(x).square().mean()


with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = Net()


class Trainee:
    """One of four ranks in a step that one rank is late for; uses no sleep."""

    def __init__(self, world, passed):
        self.model = deepcopy(MODEL)
        self.optimizer = torch.optim.SGD(self.model.student.parameters(), lr=0.05, momentum=0.9)
        self.replica = commrt.attach(
            self.model, self.optimizer, commrt.BackupWorkers(1), world=world, also=[self.model.teacher]
        )
        self.rank, self.passed, self.steps = world.rank, passed, 0
        self.is_late_at = LATE_AT if world.rank == LATE else None
        self.before_step = lambda: None

    def step(self, loss_of=lambda model, x: model(x)):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * self.rank + self.steps))
        self.steps += 1
        self.optimizer.zero_grad()
        loss = loss_of(self.model, x)
        if self.replica.step == self.is_late_at:
            assert self.passed.wait(LIMIT_S)
        loss.backward()
        self.before_step()
        self.optimizer.step()
        if self.replica.step > LATE_AT:
            self.passed.set()

    def until(self, steps, after_each=lambda: None, **options):
        while self.replica.step < steps:
            self.step(**options)
            after_each()


def of_four(body):
    """What `body` of each rank's trainee returns."""
    passed = threading.Event()
    return run_ranks(4, lambda world: body(Trainee(world, passed)))


def test_a_frozen_teacher_that_the_loop_moves_goes_along_with_the_weights():
    def body(trainee):
        def follow():
            pairs = zip(trainee.model.teacher.parameters(), trainee.model.student.parameters(), strict=True)
            for theirs, ours in pairs:
                theirs.data.lerp_(ours.data, 0.1)  # which autograd does not count

        trainee.until(STEPS, follow)
        trainee.replica.drain()
        return trainee.replica.replicas_equal()

    assert of_four(body) == [True] * 4


def test_a_buffer_that_the_loop_sets_after_a_step_stays_as_it_set_it():
    def body(trainee):
        def freeze():
            if trainee.replica.step == LATE_AT + 1:
                trainee.model.observes.zero_()

        trainee.until(STEPS, freeze)
        trainee.replica.drain()
        return trainee.model.observes.item(), trainee.replica.replicas_equal()

    assert of_four(body) == [(0, True)] * 4


def test_states_that_were_taken_in_inference_mode_can_be_stepped():
    def body(trainee):
        trainee.until(LATE_AT + 1)
        with torch.inference_mode():
            assert trainee.replica.replicas_equal()
        trainee.until(STEPS)
        return trainee.replica.replicas_equal()

    assert of_four(body) == [True] * 4


def test_samples_are_counted_also_where_the_model_is_called_with_names():
    def body(trainee):
        trainee.until(2, loss_of=lambda model, x: model(x=x))
        return trainee.replica.last.samples

    assert set(of_four(body)) <= {12, None}  # None: it was not among them
    assert 12 in of_four(body)


def test_a_batch_that_does_not_fit_into_memory_may_be_skipped():
    def body(trainee):
        failed = []

        def fail(gradient):
            if trainee.rank == 1 and trainee.replica.step >= LATE_AT and not failed:
                failed.append(True)
                raise MemoryError
            return gradient

        trainee.is_late_at = None
        trainee.model.student[0].weight.register_hook(fail)
        while trainee.replica.step < STEPS:
            try:
                trainee.step()
            except MemoryError:
                continue
        trainee.replica.drain()
        return trainee.replica.replicas_equal(), failed

    assert of_four(body) == [(True, [True] if rank == 1 else []) for rank in range(4)]


def test_changes_of_weights_after_a_dropped_batch_are_undone(caplog):
    def body(trainee):
        def decay():
            with torch.no_grad():
                for param in trainee.model.student.parameters():
                    param.mul_(0.99)

        trainee.is_late_at = None
        for _ in range(4 if trainee.rank < 2 else 7):  # the last three have too few ranks for a step
            trainee.step()
            decay()
        trainee.replica.consolidate()  # a rank that ended before the others did takes what they have
        return trainee.replica.replicas_equal()

    assert of_four(body) == [True] * 4
    assert "differed between ranks" not in caplog.text


def test_weights_that_differ_at_one_version_are_made_equal_with_a_warning(caplog):
    def body(trainee):
        trainee.until(2)
        with torch.no_grad():
            trainee.model.student[0].weight.add_(trainee.rank)
        trainee.replica.consolidate()
        return trainee.replica.replicas_equal()

    assert of_four(body) == [True] * 4
    assert "weights or buffers differed between ranks" in caplog.text


def test_an_optimizer_with_other_groups_is_an_error_in_words():
    model = deepcopy(MODEL)
    one = torch.optim.SGD(model.student[0].parameters(), lr=0.1)
    two = torch.optim.SGD(model.student[0].parameters(), lr=0.1)
    one.add_param_group({"params": model.student[2].parameters()})
    with pytest.raises(UsageError, match=r"SGD has 1 param_groups here and 2 on the rank .* add_param_group\(\)"):
        load(dump([one]), [two])


@for_each("error", [QuorumLost("", PLACE), DeadlineExceeded("", PLACE), PeerLost("", PLACE)])
def test_final_calls_run_once_before_an_error_that_ends_training(error):
    said = []
    words = FinalCalls([lambda: said.append("one"), lambda: 1 // 0, lambda: said.append("two")])
    for _ in range(2):
        words.make(error)
    assert said == ["one", "two"]


def test_final_calls_do_not_run_before_an_error_that_a_loop_may_survive():
    FinalCalls([lambda: pytest.fail("called")]).make(UsageError())


UNCLOSED = """
import torch, commrt
world = commrt.init(20.0, start_timeout_s=60.0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = commrt.attach(model, optimizer, commrt.BackupWorkers(1))
while replica.step < 5:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 5)).square().mean()
    if world.rank == 2 and replica.step == 4:
        world.store.wait(["0 is through", "1 is through"])
    loss.backward()
    optimizer.step()
if world.rank < 2:
    world.store.set(f"{world.rank} is through", "")
replica.drain()
print(replica.step, model.weight.sum().item())
"""


@pytest.mark.slow
def test_late_ranks_copy_weights_from_a_program_that_ends_without_closing_its_world():
    port = str(free_port())
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", UNCLOSED],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1


def test_a_ring_shuffle_is_refused_as_ranks_do_different_numbers_of_steps():
    def body(world):
        model = torch.nn.Linear(2, 1)
        commrt.attach(model, torch.optim.SGD(model.parameters(), 0.1), commrt.BackupWorkers(1), world=world)
        with pytest.raises(UsageError, match="with BackupWorkers ranks make different numbers of steps"):
            list(commrt.RingShuffle(torch.ones(4, 2), batch_size=2, world=world))

    run_ranks(3, body)
