# SPDX-License-Identifier: Apache-2.0
"""A process that comes later fits those who train, or is told in words what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.distributed import HashStore

import commrt
from commrt.errors import DeadlineExceeded, DisagreementError, TransportClosed, UsageError
from commrt.members.membership import Membership
from commrt.replicas.company import Company
from commrt.runtime.world import World
from commrt.store.charter import Charter
from commrt.store.presence import Doing
from commrt.transport.protocol import Group, Parcel
from commrt.transport.vacant import VacantTransport

CHARTER = Charter(4, "here", 1, {"algorithm": "backup", "buffers": "none"})


def vacant():
    return World(VacantTransport(2, range(4), 5.0), HashStore(), charter=CHARTER)


def test_a_charter_is_found_as_it_was_published_and_not_after_it_was_withdrawn():
    store = HashStore()
    assert Charter.found(store) is None
    CHARTER.publish(store)
    assert Charter.found(store) == CHARTER
    Charter.withdraw(store)
    with pytest.raises(UsageError, match="comes to a world that has trained and ended"):
        Charter.found(store)


def test_whoever_comes_from_anywhere_is_welcome_where_ranks_use_a_network():
    replace(CHARTER, host=None).require_place(2, 4, "elsewhere")
    CHARTER.require_place(2, 4, "here")


@pytest.mark.parametrize(
    ("size", "host", "kind", "says"),
    [
        (5, "here", DisagreementError, "with a world of 5 ranks to one of 4 that trains already: set the launcher"),
        (4, "elsewhere", UsageError, "through its memory: start it there"),
        (4, None, UsageError, "through its memory: start it there"),
    ],
)
def test_who_cannot_take_the_place_is_told_why(size, host, kind, says):
    with pytest.raises(kind, match=says):
        CHARTER.require_place(2, size, host)


def test_who_insists_on_another_transport_is_refused_and_not_those_who_train():
    with pytest.raises(DisagreementError, match="COMMRT_TRANSPORT=gloo, and the others train with unset"):
        CHARTER.require_place(2, 4, "here", "gloo")


@pytest.mark.parametrize(
    ("model", "claim", "kind", "says"),
    [
        (2, CHARTER.claim, UsageError, "number 1, and this process, which takes the place of rank 2, comes to it as"),
        (1, {"algorithm": "ring", "buffers": "none"}, DisagreementError, "about algorithm: 'ring' against 'backup'"),
        (1, {"algorithm": "backup"}, DisagreementError, "about buffers: 'nothing' against 'none'"),
        (1, {**CHARTER.claim, "more": "x"}, DisagreementError, "about more: 'x' against 'nothing'"),
    ],
)
def test_who_brings_another_model_is_told_what_differs(model, claim, kind, says):
    with pytest.raises(kind, match=says):
        CHARTER.require_same(2, model, claim)


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
    with vacant() as world, pytest.raises(DisagreementError, match="differs from those who train about"):
        commrt.attach(model, torch.optim.SGD(model.parameters(), 0.1), commrt.BackupWorkers(1), world=world)


def test_nothing_travels_before_it_is_let_in():
    transport = VacantTransport(2, range(4), 5.0)
    assert transport.allocate(3, torch.float32).tolist() == [0.0] * 3
    with pytest.raises(TransportClosed, match="still to be let in"):
        transport.bind(Group([Parcel(0, torch.zeros(1))], []))


def test_nobody_takes_the_place_of_a_process_that_lives_and_one_that_was_followed_ends():
    store = HashStore()
    lives, successor = (Membership(store, 2, range(4), "127.0.0.1") for _ in range(2))
    lives.enter()
    with pytest.raises(UsageError, match=r"a process of rank 2 answers at .*: another can take its place once it has"):
        successor.require_vacant()
    lives._doorbell.close()
    successor.require_vacant()
    successor.enter()
    with pytest.raises(TransportClosed, match="another process has taken the place of this one"):
        lives.follow()
    successor.follow()
    successor.leave("the test is over")


def test_of_two_processes_that_take_a_place_at_once_one_is_refused():
    store = HashStore()
    first, *successors = (Membership(store, 2, range(4), "127.0.0.1") for _ in range(3))
    first.enter()
    first._doorbell.close()
    for successor in successors:
        successor.require_vacant()
    successors[0].enter()
    with pytest.raises(
        UsageError, match="two processes take the place of rank 2 at once, and the other one came first"
    ):
        successors[1].enter()
    successors[0].follow()
    successors[0].leave("the test is over")


class Busy:
    """The others, who do not stop training."""

    said: ClassVar = []

    def of(self, ranks):
        return dict.fromkeys(ranks, Doing.TRAINS)

    def say(self, doing):
        self.said.append(doing)


def test_what_the_others_did_before_a_successor_came_ends_in_words_and_disturbs_nobody():
    company = Company(vacant(), Busy(), 2)
    company._is_new, company._world.transport.timeout_s = True, 0.1
    with pytest.raises(DeadlineExceeded, match=r"What all do together .* has been done; leave it out where world.is_s"):
        company.await_the_others()
    assert Doing.GATHERS not in Busy.said
