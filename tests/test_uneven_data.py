# SPDX-License-Identifier: Apache-2.0
"""join(): ranks that run out of data at different steps."""

from threading import Lock

import numpy as np
import pytest
import torch
from cases import for_each, on_ranks
from small_models import backward, halving, net, train_scaled, trainee
from torch import nn

import commrt
from commrt.algorithms import ring
from commrt.errors import DisagreementError, PeerLost, UsageError
from commrt.testing.ranks import run_ranks


def test_without_join_the_others_learn_that_a_rank_closed_its_world_and_what_to_do():
    def body(world):
        model, *_ = trainee(world)
        for step in range(3 - (world.rank == 1)):
            backward(model, world.rank, step)

    with pytest.raises(PeerLost, match=r"rank 1 had closed its world .*wrap the loop in replica\.join\(\).*DDP"):
        run_ranks(2, body)


@on_ranks(3)
def test_schedulers_and_scalers_given_to_join_go_on_equally_after_it(world):
    model, optimizer, replica = trainee(world)
    scheduler, scaler = halving(optimizer), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with replica.join(scheduler, scaler):
        train_scaled(model, optimizer, scaler, world.rank, (2, 5, 3)[world.rank], scheduler.step)
    train_scaled(model, optimizer, scaler, world.rank, 2, scheduler.step)
    assert (replica.replicas_equal(), scheduler.last_epoch, scaler.get_scale()) == (True, 7, 32.0)


class Keeping:
    def state_dict(self):
        return {"kept": Lock()}

    def load_state_dict(self, state):
        raise AssertionError(state)


@on_ranks(2)
def test_join_refuses_what_has_no_state_and_ranks_that_hand_over_different_things(world):
    model, _, replica = trainee(world)
    with pytest.raises(UsageError, match=r"join\(\) was given a float, which has no state_dict\(\)"):
        replica.join(0.1).__enter__()
    given = [torch.amp.GradScaler("cpu")] if world.rank == 1 else []
    with pytest.raises(DisagreementError, match="rank 1 disagrees with rank 0 about also: 'GradScaler' against"):
        replica.join(*given).__enter__()
    with replica.join():
        backward(model, world.rank)
    assert replica.step == 1


@on_ranks(2)
def test_a_state_that_cannot_be_sent_is_refused_on_all_ranks(world):
    model = net()
    replica = commrt.attach(model, world=world)
    with pytest.raises(UsageError, match="the state of Keeping cannot be sent to other ranks"):  # noqa: SIM117
        with replica.join(Keeping()):
            backward(model, world.rank)
    assert replica.replicas_equal()


@on_ranks(2)
def test_settings_of_any_kind_outlive_join(world):
    model = net()
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "shape": lambda step: step, "lr": 0.1}])
    replica = commrt.attach(model, optimizer, world=world)
    with replica.join():
        for step in range((4, 2)[world.rank]):
            optimizer.param_groups[0]["lr"] = np.float64(0.1) / (1 + step)
            optimizer.zero_grad()
            backward(model, world.rank, step)
            optimizer.step()
    group = optimizer.param_groups[0]
    assert (replica.replicas_equal(), group["lr"], type(group["lr"]), group["shape"](7)) == (True, 0.025, float, 7)


class OfThreeOrFour:
    def schedule(self, step, ranks):
        if ranks not in (3, 4):
            raise UsageError("this needs 3 or 4 ranks")
        return ring.all_reduce(ranks)


@on_ranks(4)
def test_join_is_refused_before_it_begins_where_some_number_of_ranks_could_not_go_on(world):
    replica = commrt.attach(net(), algorithm=OfThreeOrFour(), world=world)
    with pytest.raises(UsageError, match=r"cannot go on without a rank that has left join\(\): this needs 3 or 4"):
        replica.join().__enter__()


COLLECTIVES = {
    "run": lambda world, replica: world.run(ring.all_reduce(2), torch.ones(2)),
    "agree": lambda world, replica: world.agree("lunch"),
    "all_equal": lambda world, replica: world.all_equal("lunch", "soup"),
    "attach": lambda world, replica: commrt.attach(net(), world=world).detach(),
    "replicas_equal": lambda world, replica: replica.replicas_equal(),
    "disagreement": lambda world, replica: replica.disagreement(),
    "consolidate": lambda world, replica: replica.consolidate(),
    "sync_buffers": lambda world, replica: replica.sync_buffers(),
    "overwrite_with_first": lambda world, replica: replica.overwrite_with_first(),
    "load_state_dict": lambda world, replica: replica.load_state_dict({"step": 1}),
}


@for_each("algorithm", [commrt.Torus2D(), commrt.Gossip(), commrt.LocalSGD(2)])
@on_ranks(2)
def test_collectives_are_refused_inside_join(world, algorithm):
    model, optimizer, replica = trainee(world, nn.BatchNorm1d(8), algorithm=algorithm)
    with replica.join():
        for step in range((3, 1)[world.rank]):
            backward(model, world.rank, step)
            optimizer.step()
            for call in COLLECTIVES.values():
                with pytest.raises(UsageError, match=r"inside join\(\): .* so do this before join\(\) or after it"):
                    call(world, replica)
            with pytest.raises(UsageError, match=r"join\(\) inside join\(\)"), replica.join():
                pass
    assert replica.step == 3
    for call in COLLECTIVES.values():
        call(world, replica)
    assert replica.step == 1
