# SPDX-License-Identifier: Apache-2.0
"""Optimizers, their settings and the step number stay equal on all ranks."""

import numpy as np
import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, data, net, train, train_scaled, trainee
from torch import nn
from torch.nn.functional import cross_entropy
from training_ranks import with_compiled_step

import commrt
from commrt.errors import DisagreementError, UsageError
from commrt.runtime.untraced import untraced
from commrt.testing.processes import run_processes
from commrt.training.settings import settings_digest


@on_ranks(2)
def test_the_step_survives_a_checkpoint_and_must_be_the_same_everywhere(world):
    model, _, replica = trainee(world)
    backward(model, world.rank)
    state = replica.state_dict()
    replica.load_state_dict({"step": 41})
    with pytest.raises(DisagreementError, match="about step"):
        replica.load_state_dict({"step": world.rank})
    assert (state, replica.step) == ({"step": 1, "algorithm": repr(commrt.Torus2D())}, 41)


@for_each("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
@on_ranks(2)
def test_optimizers_that_have_stepped_alone_start_with_the_state_of_rank_0(world, kind):
    model = net()
    optimizer = kind(model.parameters(), 0.1, **({"momentum": 0.9} if issubclass(kind, torch.optim.SGD) else {}))

    def step(number):
        optimizer.zero_grad()
        optimizer.step(lambda: backward(model, world.rank, number) or torch.ones(()))

    step(0)
    replica = commrt.attach(model, optimizer, world=world)
    for number in range(3):
        step(number)
    assert replica.replicas_equal()


@on_ranks(2)
def test_an_optimizer_that_steps_what_nobody_averages_is_refused(world):
    model, optimizer, _ = trainee(world)
    stranger = nn.Linear(8, 3)
    optimizer.add_param_group({"params": stranger.parameters()})
    x, y = data(world.rank)
    hidden = model[1](model[0](x))
    cross_entropy(model[2](hidden) + stranger(hidden), y).backward()
    with pytest.raises(UsageError, match=r"the optimizer steps a parameter of shape \[3, 8\], which"):
        optimizer.step()


@for_each("what", ["lr", "type", "state"])
@on_ranks(2)
def test_optimizers_that_differ_are_named_on_every_rank(world, what):
    odd = world.rank == 1
    model = net()
    kind = torch.optim.Adam if what == "type" and odd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.2 if what == "lr" and odd else 0.1)
    if what == "state" and odd:
        train(model, optimizer, 0, steps=1)
    with pytest.raises(DisagreementError, match="rank 1 disagrees with rank 0 about optimizer: "):
        commrt.attach(model, optimizer, world=world)


@for_each(
    "change",
    [
        lambda group, rank: {"lr": group["lr"] * (1 + rank)},
        lambda group, rank: {"lr": torch.tensor(0.1 + rank)},
        lambda group, rank: {"betas": (0.9, 0.99 - 0.01 * rank)},
        lambda group, rank: {"maximize": rank == 1},
    ],
    ids=["rate", "rate in a tensor", "betas", "maximize"],
)
@for_each("algorithm", [commrt.Torus2D(), commrt.LocalSGD(1)])
@on_ranks(2)
def test_settings_that_come_to_differ_are_noticed_before_the_next_step(world, change, algorithm):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    commrt.attach(model, optimizer, algorithm, world=world)
    train(model, optimizer, world.rank, steps=1)
    group = optimizer.param_groups[0]
    group.update(change(group, world.rank))
    with pytest.raises(DisagreementError, match=r"settings .* differ .*: drive schedulers by what .*replica\.join"):
        train(model, optimizer, world.rank, steps=4)  # 8 bits are equal by chance once in 256 steps


def scaler_of(rank, scale=2.0**10, **settings):
    """A `GradScaler` with these settings on rank 1, and the usual ones on others."""
    return torch.amp.GradScaler("cpu", **({"init_scale": scale, "growth_interval": 2} | settings if rank == 1 else {}))


def loaded(rank):
    """A `GradScaler` that rank 0 alone has resumed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    if rank == 0:
        scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0**14).state_dict())
    return scaler


SCALERS = {
    "another scale": scaler_of,
    "loaded on rank 0": loaded,
    "off on one rank": lambda rank: torch.amp.GradScaler("cpu", enabled=rank == 0),
    "another interval": lambda rank: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2 + rank),
}


@for_each("make", [*SCALERS.values()])
@for_each("before", [0, 2])
@on_ranks(2)
def test_scalers_that_differ_are_noticed_with_their_scales(world, make, before):
    model, optimizer, _ = trainee(world)
    train(model, optimizer, world.rank, steps=before)
    with pytest.raises(
        DisagreementError, match=r"a GradScaler's scale, .* attach\(also=\).*has lr=.* GradScaler scale="
    ):
        train_scaled(model, optimizer, make(world.rank), world.rank)


@for_each("make", [scaler_of, loaded, SCALERS["another interval"]])
@for_each("algorithm", [commrt.Torus2D(), commrt.BackupWorkers(0), commrt.Gossip(), commrt.LocalSGD(2)])
@on_ranks(2)
def test_what_is_given_to_also_begins_as_on_rank_0(world, make, algorithm):
    model, scaler = net(), make(world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = commrt.attach(model, optimizer, algorithm, world=world, also=[scaler])
    begun = scaler.get_scale()
    train_scaled(model, optimizer, scaler, world.rank)
    replica.consolidate()
    assert (begun, replica.replicas_equal()) == (make(0).get_scale(), True)


@on_ranks(3)
def test_settings_that_are_equal_in_value_are_equal_in_any_form(world):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = commrt.attach(model, optimizer, world=world)
    group = optimizer.param_groups[0]
    for step in range(3):
        group["lr"] = (1, np.float32(1), torch.tensor(1.0))[(world.rank + step) % 3]
        group["note"] = f"of rank {world.rank}"
        optimizer.param_groups[0] = group = dict(sorted(group.items(), reverse=world.rank == 1))
        backward(model, world.rank, step)
    assert replica.step == 3


def digest(lr, step):
    return settings_digest([torch.optim.AdamW([torch.ones(1)], lr=lr)], step)


def test_settings_that_are_alike_by_chance_differ_in_other_steps():
    alike = next(lr for lr in np.arange(0.101, 1.0, 0.001) if digest(lr, 0) == digest(0.1, 0))
    assert sum(digest(alike, step) == digest(0.1, step) for step in range(64)) < 8


def test_what_is_no_number_that_can_be_read_is_left_out():
    optimizer = torch.optim.AdamW([torch.ones(1)])
    before = settings_digest([optimizer], 0)
    for other in ("adaptive", None, torch.ones(3), torch.ones((), device="meta"), 1j, print):
        optimizer.param_groups[0]["other"] = other
        assert settings_digest([optimizer], 0) == before, other


@pytest.mark.slow  # torch imports all of its compiler
def test_what_is_untraced_runs_between_the_graphs():
    @untraced
    def is_traced():
        return torch.compiler.is_compiling()

    assert torch.compile(lambda x: (x + 1, is_traced()), backend="eager")(torch.ones(1)) == (2, False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "algorithm",
    [commrt.Gossip(), commrt.LocalSGD(2, outer=commrt.local_sgd.Nesterov())],
    ids=["gossip", "local SGD"],
)
def test_a_compiled_step_exchanges_as_one_that_is_not(algorithm):
    eager, compiled = (run_processes(2, with_compiled_step, algorithm, how, limit_s=100) for how in (False, True))
    assert [end.error for end in compiled] == [None, None]
    assert [end.value for end in compiled] == [end.value for end in eager]
