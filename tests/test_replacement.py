# SPDX-License-Identifier: Apache-2.0
"""A process takes the place of a dead rank while the others train, or is told in words why it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import for_each
from failing_collectives import collectives_at, ends_early
from torch.distributed import HashStore

import commrt
from commrt.errors import DisagreementError, TransportClosed, UsageError
from commrt.runtime.world import World
from commrt.store.agreement import WorldConfig
from commrt.testing.processes import RESTART, run_processes
from commrt.transport.protocol import NullTransport, P2PGroup, P2PMessage

sys.path.insert(0, str(Path(__file__).parent / "audits"))
from fault_cost import Fault, reference_holds, run_with_faults
from replacements import train_with_deaths

AT = 4
CONFIG = WorldConfig(4, "here", 1, {"algorithm": "backup", "buffers": "none"})


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
    replace(CONFIG, host=None).require_place(2, 4, "elsewhere")
    CONFIG.require_place(2, 4, "here")


@for_each(
    ("size", "host", "kind", "says"),
    [
        (5, "here", DisagreementError, "with a world of 5 ranks, and 4 ranks train already: set the launcher"),
        (4, "elsewhere", UsageError, "through shared memory: start it there"),
        (4, None, UsageError, "through shared memory: start it there"),
    ],
)
def test_a_replacement_with_another_world_size_or_host_is_refused(size, host, kind, says):
    with pytest.raises(kind, match=says):
        CONFIG.require_place(2, size, host)


def test_a_replacement_with_another_transport_is_refused():
    with pytest.raises(DisagreementError, match="COMMRT_TRANSPORT=gloo, and the others train with unset"):
        CONFIG.require_place(2, 4, "here", "gloo")


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
    with (
        replacement_world() as world,
        pytest.raises(UsageError, match="takes the place of rank 2, which is gone, while the others"),
    ):
        call(world)


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


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("where", ["backward", "reducing"])
def test_a_replacement_copies_the_weights_of_the_others_and_counts(where):
    ends = run_with_faults(4, commrt.BackupWorkers(1), [Fault(2, AT, where, "replace")])
    assert [end.error for end in ends] == [None] * 4
    reference_holds(ends, needed=3)
    assert all(end.value["equal"] and not end.value["lost"] for end in ends)
    assert any(2 in members and step > AT for step, members in ends[2].value["used"].items())


@pytest.mark.slow
@pytest.mark.processes
def test_repeated_deaths_of_two_ranks_with_replacements_lose_no_step():
    found = train_with_deaths(6, 2, deaths=3)
    assert found.deaths == 3


@pytest.mark.slow
@pytest.mark.processes
def test_the_holder_of_the_store_waits_for_ranks_that_train_longer_than_the_timeout():
    ends = run_processes(3, ends_early, 45)
    assert [end.error for end in ends] == [None] * 3
    assert all(end.value >= 35 for end in ends[1:])


def killed(_, message, process):
    process.kill()
    return RESTART if message == "replace" else True


@pytest.mark.processes
def test_a_replacement_makes_the_collectives_after_its_first_step():
    ends = run_processes(4, collectives_at, (10, 12, 40), on_message=killed)
    assert [end.error for end in ends] == [None] * 4
    assert all(equal for end in ends for _, equal in end.value)
    assert [end.value[-1][0] for end in ends] == [40] * 4
