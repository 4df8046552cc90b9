# SPDX-License-Identifier: Apache-2.0
"""A process that comes to take the place of a dead rank is told in words why it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import for_each
from torch.distributed import HashStore

import commrt
from commrt.errors import DisagreementError, TransportClosed, UsageError
from commrt.local_sgd import LocalSGD
from commrt.runtime.connection import ReconnectOptions
from commrt.runtime.world import World
from commrt.store.world_config import WorldConfig
from commrt.training.arrival import StateGiver
from commrt.transport.local import Fabric
from commrt.transport.null import NullTransport
from commrt.transport.protocol import P2PGroup, P2PMessage

CONFIG = WorldConfig(4, 6, "here", 1, {"algorithm": "backup", "buffers": "none"})


def replacement_world():
    return World(NullTransport(2, range(4), 5.0), HashStore(), config=CONFIG)


def test_a_configuration_is_read_as_published_until_it_is_withdrawn():
    store = HashStore()
    assert WorldConfig.read(store) is None
    CONFIG.publish(store)
    assert WorldConfig.read(store) == CONFIG
    WorldConfig.withdraw(store)
    with pytest.raises(UsageError, match="comes to a world whose training has ended"):
        WorldConfig.read(store)


def test_a_replacement_may_run_on_any_host_where_ranks_use_a_network():
    replace(CONFIG, host=None).require_place(2, 4, 6, "elsewhere")
    CONFIG.require_place(2, 4, 6, "here")


@for_each(
    ("place", "kind", "says"),
    [
        ((5, 6, "here"), DisagreementError, "with a world of 5 ranks, and 4 ranks train already: set the launcher"),
        ((4, 6, "elsewhere"), UsageError, "through shared memory: start it there"),
        ((4, 6, None), UsageError, "through shared memory: start it there"),
        ((4, 8, "here"), DisagreementError, "places for 8 ranks, and the others with 6: call init"),
        ((4, 6, "here", "gloo"), DisagreementError, "COMMRT_TRANSPORT=gloo, and the others train with unset"),
    ],
)
def test_a_replacement_with_another_world_size_host_or_transport_is_refused(place, kind, says):
    with pytest.raises(kind, match=says):
        CONFIG.require_place(2, *place)


@for_each(
    ("model", "claim", "kind", "says"),
    [
        (2, CONFIG.claim, UsageError, "number 1, and this process.* attaches its number"),
        (1, {"algorithm": "ring", "buffers": "none"}, DisagreementError, "about algorithm: 'ring' against 'backup'"),
        (1, {"algorithm": "backup"}, DisagreementError, "about buffers: 'nothing' against 'none'"),
        (1, {**CONFIG.claim, "more": "x"}, DisagreementError, "about more: 'x' against 'nothing'"),
    ],
)
def test_a_replacement_with_another_model_is_told_what_differs(model, claim, kind, says):
    with pytest.raises(kind, match=says):
        CONFIG.require_same(2, model, claim)


@for_each(
    "call",
    [
        lambda world: world.agree("anything"),
        lambda world: commrt.attach(torch.nn.Linear(2, 2), algorithm=commrt.Gossip(), world=world),
        lambda world: world.run(commrt.Ring().schedule(0, 4), torch.zeros(8)),
    ],
)
def test_a_replacement_cannot_call_collectives_before_it_is_admitted(call):
    with replacement_world() as world, pytest.raises(UsageError, match="takes the place of rank 2 while the others"):
        call(world)


@for_each(
    ("algorithm", "says"),
    [
        (commrt.Torus2D(), "only to BackupWorkers, LocalSGD and gossip of weights can ranks come"),
        (commrt.Gossip(payload="gradients"), "only to BackupWorkers, LocalSGD and gossip of weights can ranks come"),
        (LocalSGD(2, delay=1), "ranks that come later need delay=0"),
    ],
)
def test_what_ranks_cannot_come_to_refuses_places_for_more(algorithm, says):
    model, places = torch.nn.Linear(2, 2), ReconnectOptions(lambda *_: None, places=4)
    world = World(Fabric(1).transport(0), HashStore(), reconnect_options=places)
    with world, pytest.raises(UsageError, match=says):
        commrt.attach(model, torch.optim.SGD(model.parameters(), 0.1), algorithm, world=world)


def test_a_replacement_with_another_model_is_refused_before_it_contacts_a_rank():
    model = torch.nn.Linear(2, 2)
    said = "takes the place of rank 2: rank 2 disagrees with rank 0"
    with replacement_world() as world, pytest.raises(DisagreementError, match=said):
        commrt.attach(model, torch.optim.SGD(model.parameters(), 0.1), commrt.BackupWorkers(1), world=world)


def test_a_replacement_sends_nothing_before_it_is_admitted():
    transport = NullTransport(2, range(4), 5.0)
    assert transport.allocate(3, torch.float32).tolist() == [0.0] * 3
    with pytest.raises(TransportClosed, match="have not admitted this rank yet"):
        transport.bind(P2PGroup([P2PMessage(0, torch.zeros(1))], []))


def test_no_state_is_packed_for_a_process_that_gave_up():
    with World(NullTransport(0, range(2), 0.2), HashStore()) as world:
        giver = StateGiver(world, 1)
        assert ([*giver._give(0)], giver.is_asked, giver.close()) == ([], False, None)
