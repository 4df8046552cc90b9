# SPDX-License-Identifier: Apache-2.0
"""A process that comes later fits those who train, or is told in words what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

import commrt
from commrt.errors import DisagreementError, TransportClosed, UsageError
from commrt.membership.world_config import WorldConfig
from commrt.runtime.world import World
from commrt.transport.protocol import Group, Parcel
from commrt.transport.vacant import VacantTransport

CONFIG = WorldConfig(4, "here", 1, {"algorithm": "backup", "buffers": "none"})


def vacant():
    return World(VacantTransport(2, range(4), 5.0), HashStore(), config=CONFIG)


def test_a_configuration_is_found_as_it_was_published_and_not_after_it_was_withdrawn():
    store = HashStore()
    assert WorldConfig.read(store) is None
    CONFIG.publish(store)
    assert WorldConfig.read(store) == CONFIG
    WorldConfig.withdraw(store)
    with pytest.raises(UsageError, match="comes to a world whose training has ended"):
        WorldConfig.read(store)


def test_whoever_comes_from_anywhere_is_welcome_where_ranks_use_a_network():
    replace(CONFIG, host=None).require_place(2, 4, "elsewhere")
    CONFIG.require_place(2, 4, "here")


@pytest.mark.parametrize(
    ("size", "host", "kind", "says"),
    [
        (5, "here", DisagreementError, "with a world of 5 ranks, and 4 ranks train already: set the launcher"),
        (4, "elsewhere", UsageError, "through shared memory: start it there"),
        (4, None, UsageError, "through shared memory: start it there"),
    ],
)
def test_who_cannot_take_the_place_is_told_why(size, host, kind, says):
    with pytest.raises(kind, match=says):
        CONFIG.require_place(2, size, host)


def test_who_insists_on_another_transport_is_refused_and_not_those_who_train():
    with pytest.raises(DisagreementError, match="COMMRT_TRANSPORT=gloo, and the others train with unset"):
        CONFIG.require_place(2, 4, "here", "gloo")


@pytest.mark.parametrize(
    ("model", "claim", "kind", "says"),
    [
        (
            2,
            CONFIG.claim,
            UsageError,
            "number 1, and this process.* attaches its number",
        ),
        (1, {"algorithm": "ring", "buffers": "none"}, DisagreementError, "in algorithm: 'ring' against 'backup'"),
        (1, {"algorithm": "backup"}, DisagreementError, "in buffers: 'nothing' against 'none'"),
        (1, {**CONFIG.claim, "more": "x"}, DisagreementError, "in more: 'x' against 'nothing'"),
    ],
)
def test_who_brings_another_model_is_told_what_differs(model, claim, kind, says):
    with pytest.raises(kind, match=says):
        CONFIG.require_same(2, model, claim)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: world.agree("anything"),
        lambda world: world.run(commrt.Ring().schedule(0, 4), torch.zeros(8)),
        lambda world: commrt.attach(torch.nn.Linear(2, 2), world=world),
        lambda world: commrt.attach(torch.nn.Linear(2, 2), algorithm=commrt.Gossip(), world=world),
        lambda world: commrt.RingShuffle([torch.zeros(8)], 2, world=world),
    ],
)
def test_until_it_is_let_in_nothing_can_be_done_with_the_others(call):
    with (
        vacant() as world,
        pytest.raises(UsageError, match="takes the place of rank 2, which is gone, while the others"),
    ):
        call(world)


def test_another_model_than_theirs_is_refused_before_anybody_is_called():
    model = torch.nn.Linear(2, 2)
    with vacant() as world, pytest.raises(DisagreementError, match="differs from the others in"):
        commrt.attach(model, torch.optim.SGD(model.parameters(), 0.1), commrt.BackupWorkers(1), world=world)


def test_nothing_travels_before_it_is_let_in():
    transport = VacantTransport(2, range(4), 5.0)
    assert transport.allocate(3, torch.float32).tolist() == [0.0] * 3
    with pytest.raises(TransportClosed, match="still to be let in"):
        transport.bind(Group([Parcel(0, torch.zeros(1))], []))
