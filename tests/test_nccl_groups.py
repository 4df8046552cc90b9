# SPDX-License-Identifier: Apache-2.0
"""A wide hop is sent in several NCCL groups, the same at both ends; `studies/nccl_cuts` shows why none may be larger.

`dev/prove.py` counts the messages in the groups of every schedule.
"""

from __future__ import annotations

from unittest.mock import Mock

import nccl_stand_in as nccl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transports import over_nccl

from commrt.algorithms import direct
from commrt.c10d.group import DeviceMessages
from commrt.program import MOST_MESSAGES, nccl_groups, program
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks
from commrt.transport.nccl_communicator import uncut
from commrt.transport.protocol import P2PGroup, P2PMessage

RANKS = 20
LARGE = torch.empty(1 << 20, dtype=torch.uint8, device="meta")


def peers_of(groups):
    return [[each.peer for each in (*some.sends, *some.recvs)] for some in groups]


def test_both_ends_have_a_message_in_the_same_group():
    schedule = direct.all_gather(RANKS)
    hops = [program(schedule, rank).hops[0] for rank in range(RANKS)]
    for rank, hop in enumerate(hops):
        for sent in hop.sends:
            (there,) = [each for each in hops[sent.peer].recvs if each.peer == rank]
            assert there.group == sent.group
    assert {each.group for each in hops[3].sends} == {0, 1, 2}
    assert {each.group for each in program(direct.all_gather(8), 3).hops[0].sends} == {None}


def test_a_root_sends_seven_messages_in_one_group_and_the_eighth_in_another():
    groups = {ranks: nccl_groups(next(iter(direct.broadcast(ranks).steps())).canonical(), ranks) for ranks in (8, 9)}
    assert groups[8] is None
    assert groups[9].tolist() == [0] * MOST_MESSAGES + [1]


def test_groups_have_one_order_on_all_ranks_and_small_messages_share_them():
    small = torch.zeros(8)
    sends = [P2PMessage(1, LARGE, 20), P2PMessage(2, small, 20), P2PMessage(3, LARGE, 0), P2PMessage(4, small, 2)]
    found = uncut(P2PGroup(sends, [P2PMessage(5, small, 17)], hop=7), 0, range(6))
    assert peers_of(found) == [[4, 5], [2], [3], [1]]
    assert {some.hop for some in found} == {7}
    assert uncut(P2PGroup([], []), 0, range(6)) == []


def test_a_short_batch_without_a_schedule_is_one_group_as_nccl_s_own():
    """A rank may wait for what another one sends only after a later batch, so its own must not be parted."""
    sends = [P2PMessage(peer, LARGE) for peer in (1, 1, 1, 19)]
    recvs = [P2PMessage(peer, LARGE) for peer in (1, 2, 19)]
    assert peers_of(uncut(P2PGroup(sends, recvs), 0, range(RANKS))) == [[1, 1, 1, 19, 1, 2, 19]]
    assert len(uncut(P2PGroup(sends, [*recvs, P2PMessage(2, LARGE)]), 0, range(RANKS))) > 1
    long = [P2PMessage(peer, LARGE) for peer in range(1, RANKS) for _ in range(3)]
    counts = [len(some.sends) for some in uncut(P2PGroup(long, []), 0, range(RANKS))]
    assert (sum(counts), max(counts)) == (len(long), MOST_MESSAGES)


@given(st.integers(2, 40), st.data())
def test_messages_without_a_schedule_are_in_the_same_group_at_both_ends(ranks, data):
    one, other = data.draw(st.lists(st.integers(0, ranks - 1), min_size=2, max_size=2, unique=True))
    count = data.draw(st.integers(MOST_MESSAGES + 1, 40))
    there = uncut(P2PGroup([P2PMessage(other, LARGE)] * count, []), one, range(ranks))
    here = uncut(P2PGroup([], [P2PMessage(one, LARGE)] * count), other, range(ranks))
    assert [some.sends[0].group for some in there] == [some.recvs[0].group for some in here]
    assert {len(some.sends) for some in there} == {1}


def exchanged_in_a_wide_hop(world):
    row = torch.full((RANKS, 1), float(world.rank)).flatten()
    world.run(direct.all_gather(RANKS), row)
    return row.tolist() == [*range(RANKS)]


def exchanged_in_a_long_batch(world):
    batch, places = DeviceMessages(world), torch.zeros(3, world.size)
    for number, row in enumerate(places):
        for peer in range(world.size):
            if peer != world.rank:
                batch.post(torch.tensor([100.0 * number + world.rank]), peer, is_send=True)
                work = batch.post(row[peer : peer + 1], peer, is_send=False)
    work.wait()
    expected = torch.arange(world.size) + 100.0 * torch.arange(3)[:, None]
    expected[:, world.rank] = 0.0
    return torch.equal(places, expected)


@pytest.mark.parametrize(("body", "ranks"), [(exchanged_in_a_wide_hop, RANKS), (exchanged_in_a_long_batch, 9)])
def test_what_is_sent_in_several_groups_arrives(body, ranks, monkeypatch):
    """Messages of any size are large here. The stand-in lets ranks whose groups differ wait for ever, or raises."""
    begun = Mock(wraps=nccl.groupStart)
    monkeypatch.setattr(nccl, "groupStart", begun)
    monkeypatch.setattr("commrt.program.JOINED", ((float("inf"), 1),))
    monkeypatch.setattr(World, "connect", lambda world, device: None)
    assert run_ranks(ranks, body, connect=over_nccl) == [True] * ranks
    assert begun.call_count > ranks
