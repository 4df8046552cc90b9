# SPDX-License-Identifier: Apache-2.0
"""NCCL cuts large groups into several kernels, each rank on its own: which groups may then wait for ever."""

from __future__ import annotations

import random
import threading
from collections import Counter
from itertools import chain
from math import inf

import nccl_stand_in as nccl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nccl_cut import cutting
from nccl_messages import group_of, in_groups, messages_of, step_of
from nccl_plans import Call, Rules, cut, find_cycle
from transports import over_nccl

from commrt.algorithms import direct, halving_doubling
from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.ring import Ring
from commrt.c10d.group import DeviceMessages
from commrt.errors import DeadlineExceeded
from commrt.program import MOST_MESSAGES, member_program, nccl_groups, program
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.testing.ranks import run_ranks
from commrt.transport.nccl_communicator import uncut as in_uncut
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

VERSIONS = (22707, 22809, 22902, 22907, 23007)
LARGE = 1 << 26


def uncut(messages, ranks, rules):
    """True if each rank sends each of its groups by one kernel."""
    return all(
        len(cut(rank, ranks, calls, rules)) == 1
        for some in in_groups(messages, ranks)
        for rank, calls in enumerate(group_of(some, ranks))
    )


def uneven(seed, ranks, count):
    draw = random.Random(seed)
    sizes = (1000, 1 << 18, 1 << 22, LARGE)
    pairs = ((draw.randrange(ranks), draw.randrange(ranks)) for _ in range(count))
    return [(one, other, draw.choice(sizes)) for one, other in pairs if one != other]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks", [64, 128])
def test_a_uniform_exchange_of_many_ranks_is_cut_and_ends(version, ranks):
    step = next(iter(direct.all_gather(ranks).steps()))
    messages = messages_of(step, LARGE)
    groups = group_of(messages, ranks)
    assert (len(cut(0, ranks, groups[0], Rules(version))) > 1) == (version > 22707)  # which shares batches more freely
    assert find_cycle(groups, Rules(version)) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("from_root", [True, False])
def test_a_root_of_300_ranks_is_cut_alone_and_ends(version, from_root):
    messages = [(0, rank, LARGE) if from_root else (rank, 0, LARGE) for rank in range(1, 300)]
    groups = group_of(messages, 300)
    assert [len(cut(rank, 300, groups[rank], Rules(version))) for rank in (0, 1)] == [6 if version > 22707 else 1, 1]
    assert find_cycle(groups, Rules(version)) is None


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_uneven_pieces_of_128_ranks_are_cut_and_end(version):
    draw = random.Random(0)
    pairs = ((one, other) for one in range(128) for other in range(128) if one != other)
    groups = group_of([(*pair, draw.choice((8, LARGE, 8 * LARGE))) for pair in pairs], 128)
    assert len(cut(0, 128, groups[0], Rules(version))) > 1
    assert find_cycle(groups, Rules(version)) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks", [33, 65, 127])
def test_folds_of_odd_counts_of_ranks_end(version, ranks):
    for step in halving_doubling.all_reduce(ranks).steps():
        messages = messages_of(step, LARGE)
        assert find_cycle(group_of(messages, ranks), Rules(version)) is None


@given(
    st.sampled_from(VERSIONS),
    st.sampled_from([None, 1, 2, 4]),
    st.integers(2, 9),
    st.data(),
)
def test_no_cut_can_hang_where_a_pair_has_one_message(version, ranks_per_node, ranks, data):
    rank = st.integers(0, ranks - 1)
    pairs = data.draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])))
    messages = [(*pair, data.draw(st.sampled_from([0, 1000, 1 << 20, LARGE]))) for pair in sorted(pairs)]
    one_node = ranks_per_node is None or ranks % ranks_per_node
    rules = Rules(version, 8, 4, None if one_node else ranks_per_node, arguments_nbytes=16 * 6)
    assert find_cycle(group_of(messages, ranks), rules) is None


@pytest.mark.parametrize("version", [22707, 22809, 22902])
def test_uneven_groups_with_several_messages_of_a_pair_hang_before_2_29_7_and_are_sent_in_uncut_ones(version):
    hanging = [
        messages for seed in range(8) if find_cycle(group_of(messages := uneven(seed, 4, 800), 4), Rules(version))
    ]
    assert hanging
    for messages in hanging:
        assert uncut(messages, 4, Rules(version))
        assert find_cycle(group_of(messages, 4), Rules(22907)) is None


def test_the_circle_says_who_waits_for_what():
    found = next(filter(None, (find_cycle(group_of(uneven(seed, 4, 800), 4), Rules(22809)) for seed in range(8))))
    assert len(found) >= 2
    assert all("in plan" in line and "rank" in line for line in found)


def test_a_group_that_fits_one_kernel_is_not_cut():
    assert len(cut(0, 4, [Call(peer, is_send, LARGE) for peer in (1, 2, 3) for is_send in (True, False)], Rules())) == 1


def test_a_call_without_its_other_end_is_refused():
    with pytest.raises(ValueError, match="rank 0 sends 1 times to rank 1, which receives 0 times"):
        find_cycle([[Call(1, True, 8)], []], Rules())


@pytest.mark.parametrize("ranks_per_node", [None, 8])
@pytest.mark.parametrize("nbytes", [8, 1 << 16, 1 << 19, LARGE])
@pytest.mark.parametrize("ranks", [5, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_no_group_of_any_schedule_is_ever_cut(ranks, nbytes, ranks_per_node):
    if ranks_per_node is not None and ranks % ranks_per_node:
        pytest.skip("hosts are full")
    for collective in COLLECTIVES:
        for schedule in candidates(collective, ranks).values():
            for step in {step.text(10**6): step for step in schedule.steps()}.values():
                moved = step.canonical()
                messages = [
                    (one, other, nbytes) for one, other in zip(moved.src.tolist(), moved.dst.tolist(), strict=True)
                ]
                assert all(
                    uncut(messages, ranks, Rules(version, ranks_per_node=ranks_per_node)) for version in VERSIONS
                )


@given(st.integers(2, 12), st.data())
def test_no_group_of_random_messages_is_ever_cut(ranks, data):
    rank = st.integers(0, ranks - 1)
    pairs = data.draw(st.lists(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=150))
    messages = [(*pair, data.draw(st.sampled_from([8, 1 << 16, 1 << 18, 1 << 22, LARGE]))) for pair in pairs]
    per_node = data.draw(st.sampled_from([None, *(each for each in (1, 2, 4) if ranks % each == 0)]))
    assert uncut(messages, ranks, Rules(data.draw(st.sampled_from(VERSIONS)), ranks_per_node=per_node))
    assert sorted(chain.from_iterable(in_groups(messages, ranks))) == sorted(messages)


@pytest.mark.parametrize("version", VERSIONS[1:])
@pytest.mark.parametrize(("nbytes", "most"), [(LARGE, MOST_MESSAGES), (1 << 19, 3 * MOST_MESSAGES)])
def test_a_kernel_takes_as_many_messages_as_a_group_may_have_even_if_no_two_share_a_batch(version, nbytes, most):
    rules = Rules(version, ranks_per_node=1)
    peers = [distance for (distance, _), number in rules.rounds(512).items() if number and number % 8 == 0]
    assert len(cut(0, 512, [Call(peer, True, nbytes) for peer in peers[:most]], rules)) == 1
    assert len(cut(0, 512, [Call(peer, True, LARGE) for peer in peers[: MOST_MESSAGES + 1]], rules)) == 2


def test_both_ends_have_a_message_in_the_same_group():
    schedule = direct.all_gather(20)
    programs = [program(schedule, rank).hops[0] for rank in range(20)]
    for rank, hop in enumerate(programs):
        for sent in hop.sends:
            (there,) = [each for each in programs[sent.peer].recvs if each.peer == rank]
            assert there.group == sent.group
    assert {each.group for each in programs[3].sends} == {0, 1, 2}
    assert {each.group for each in program(direct.all_gather(8), 3).hops[0].sends} == {None}


def test_groups_have_one_order_on_all_ranks_and_small_messages_share_them():
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    sends = [P2PMessage(1, large, 20), P2PMessage(2, small, 20), P2PMessage(3, large, 0), P2PMessage(4, small, 2)]
    found = in_uncut(P2PGroup(sends, [P2PMessage(5, small, 17)], hop=7), 0, range(6))
    assert [[each.peer for each in (*some.sends, *some.recvs)] for some in found] == [[4, 5], [2], [3], [1]]
    assert {some.hop for some in found} == {7}
    assert in_uncut(P2PGroup([], []), 0, range(6)) == []


@given(st.integers(2, 40), st.data())
def test_messages_without_a_schedule_are_in_the_same_group_at_both_ends(ranks, data):
    one, other = data.draw(st.lists(st.integers(0, ranks - 1), min_size=2, max_size=2, unique=True))
    count = data.draw(st.integers(MOST_MESSAGES + 1, 40))
    nothing = torch.zeros(1 << 18)
    there = in_uncut(P2PGroup([P2PMessage(other, nothing)] * count, []), one, range(ranks))
    here = in_uncut(P2PGroup([], [P2PMessage(one, nothing)] * count), other, range(ranks))
    assert [some.sends[0].group for some in there] == [some.recvs[0].group for some in here]
    assert {len(some.sends) for some in there} == {1}  # large ones


@pytest.mark.parametrize(("algorithm", "groups"), [(Ring(), [1]), (DoubleTree(), [1])])
def test_a_hop_of_few_messages_is_one_group_of_nccl(algorithm, groups, monkeypatch):
    begun = Counter()
    end = nccl.groupEnd

    def counted():
        begun[threading.get_ident()] += 1
        end()

    monkeypatch.setattr(nccl, "groupEnd", counted)
    schedule = algorithm.schedule(0, 2)

    def run(world):
        row = torch.full((schedule.chunks * 16,), world.rank + 1.0)
        program = bind(member_program(schedule, (0, 1), world.rank, 2), row, world.transport)
        counts = []
        for hop in program.hops:
            before = begun[threading.get_ident()]
            hop.exchange(Tag(0, 0))
            counts.append(begun[threading.get_ident()] - before)
            for combine in hop.combinations:
                combine()
        return sorted(set(counts)), row

    for found, row in run_ranks(2, run, connect=over_nccl):
        assert found == groups
        assert (row == 3).all()


SMALL = Rules(22809, channels=4, channels_per_peer=1, arguments_nbytes=16 * 7)
"""A kernel takes seven messages."""


@pytest.fixture
def all_are_large(monkeypatch):
    """For groups, messages of any size are large."""
    monkeypatch.setattr("commrt.program.JOINED", ((inf, 1),))


def small_messages(seed):
    draw = random.Random(seed)
    pairs = ((draw.randrange(6), draw.randrange(6)) for _ in range(400))
    return [(one, other, 4) for one, other in pairs if one != other]


def exchanged(messages, timeout_s, *, grouped):
    """Let 6 ranks exchange `messages` in one hop, of which the k-th carries k; return what came, by its number."""
    step = step_of(messages)
    groups = dict(zip((step.lo // 2).tolist(), nccl_groups(step, 6).tolist(), strict=True)) if grouped else {}

    def body(world):
        ours = [(number, one, other) for number, (one, other, _) in enumerate(messages) if world.rank in (one, other)]
        sends = [
            P2PMessage(other, torch.tensor([float(number)]), groups.get(number, 0))
            for number, one, other in ours
            if one == world.rank
        ]
        places = {number: torch.zeros(1) for number, _, other in ours if other == world.rank}
        recvs = [P2PMessage(messages[number][0], place, groups.get(number, 0)) for number, place in places.items()]
        world.comm_thread.run(lambda: world.transport.bind(P2PGroup(sends, recvs))(Tag(0, 0))).result()
        return places

    found = run_ranks(6, body, timeout_s, connect=over_nccl)
    return {number: place.item() for places in found for number, place in places.items()}


HANGING = [seed for seed in range(8) if find_cycle(group_of(small_messages(seed), 6), SMALL)]
ENDING = [seed for seed in range(8) if seed not in HANGING]


def test_what_hangs_in_the_stand_in_ends_there_in_groups(all_are_large):
    """All calls of a kernel begin together there, so less hangs than in the model."""

    def hangs(messages):
        try:
            exchanged(messages, 1.0, grouped=False)
        except DeadlineExceeded:
            return True
        return False

    with cutting(SMALL):
        messages = next(filter(hangs, map(small_messages, HANGING)))
        assert exchanged(messages, 20.0, grouped=True) == {number: number for number in range(len(messages))}


@pytest.mark.parametrize("place", range(2))
def test_what_ends_in_the_model_ends_in_the_stand_in(place):
    messages = small_messages(ENDING[place])
    with cutting(SMALL):
        assert exchanged(messages, 20.0, grouped=False) == {number: number for number in range(len(messages))}


@pytest.mark.parametrize("ranks", [3, 5, 12])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_ends_where_kernels_take_seven_messages(collective, ranks, all_are_large):
    def body(world):
        for schedule in candidates(collective, ranks).values():
            world.run(schedule, torch.ones(2 * schedule.chunks))

    with cutting(SMALL):
        run_ranks(ranks, body, connect=over_nccl)


def test_a_batch_of_torch_distributed_ends_where_kernels_take_seven_messages(monkeypatch, all_are_large):
    monkeypatch.setattr(World, "connect", lambda world, device: None)
    messages = small_messages(HANGING[0])

    def body(world):
        batch, places = DeviceMessages(world), {}
        for number, (one, other, _) in enumerate(messages):
            if one == world.rank:
                batch.post(torch.tensor([float(number)]), other, is_send=True)
            if other == world.rank:
                places[number] = torch.zeros(1)
                work = batch.post(places[number], one, is_send=False)
        work.wait()
        return all(place.item() == number for number, place in places.items())

    with cutting(SMALL):
        assert all(run_ranks(6, body, connect=over_nccl))


def test_ends_of_a_short_batch_may_come_in_several_batches(monkeypatch):
    """Rank 0 posts all at once. Rank 1 receives one after the other, then sends to rank 2, for which rank 0 waits."""
    monkeypatch.setattr(World, "connect", lambda world, device: None)

    def body(world):
        batch, places = DeviceMessages(world), [torch.zeros(1) for _ in range(2)]
        if world.rank == 0:
            works = [batch.post(torch.tensor([float(number)]), 1, is_send=True) for number in range(2)]
            works.append(batch.post(places[0], 2, is_send=False))
            works[-1].wait()
        elif world.rank == 1:
            for place in places:
                batch.post(place, 0, is_send=False).wait()
            batch.post(places[1], 2, is_send=True).wait()
        else:
            batch.post(places[0], 1, is_send=False).wait()
            batch.post(places[0], 0, is_send=True).wait()
        return places[0].item()

    with cutting(Rules()):  # where nothing compares groups
        assert run_ranks(3, body, connect=over_nccl) == [1.0, 0.0, 1.0]
