# SPDX-License-Identifier: Apache-2.0
"""NCCL cuts large groups into several kernels, each rank on its own: which groups may then wait for ever."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commrt.algorithms import direct, halving_doubling
from commrt.algorithms.catalogue import ALGORITHMS, COLLECTIVES, by_name, candidates
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.ring import Ring
from commrt.c10d.messages import DeviceMessages
from commrt.errors import DeadlineExceeded
from commrt.program import member_program
from commrt.runtime.executor import bind
from commrt.runtime.world import World
from commrt.testing import nccl
from commrt.testing.nccl_cut import cutting
from commrt.testing.nccl_plans import Call, Rules, cut, find_cycle
from commrt.testing.ranks import over_nccl, run_ranks
from commrt.transport.protocol import P2PGroup, P2PMessage, Tag

VERSIONS = (22707, 22809, 22902, 22907, 23007)
LARGE = 1 << 26


def group_of(messages, ranks):
    """Return what each rank calls for ``(source, target, nbytes)``."""
    groups = [[] for _ in range(ranks)]
    for source, target, nbytes in messages:
        groups[source].append(Call(target, True, nbytes))
        groups[target].append(Call(source, False, nbytes))
    return groups


def in_rounds(messages):
    """Return lists of messages, each with the next one of each pair."""
    rounds, seen = [], Counter()
    for message in messages:
        number = seen[message[:2]]
        seen[message[:2]] += 1
        rounds += [[]] if number == len(rounds) else []
        rounds[number].append(message)
    return rounds


def uneven(seed, ranks, count):
    draw = random.Random(seed)
    sizes = (1000, 1 << 18, 1 << 22, LARGE)
    pairs = ((draw.randrange(ranks), draw.randrange(ranks)) for _ in range(count))
    return [(one, other, draw.choice(sizes)) for one, other in pairs if one != other]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks", [64, 128])
def test_a_uniform_exchange_of_many_ranks_is_cut_and_ends(version, ranks):
    step = next(iter(direct.all_gather(ranks).steps()))
    messages = [(one, other, LARGE) for one, other in zip(step.src.tolist(), step.dst.tolist(), strict=True)]
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
        messages = [(one, other, LARGE) for one, other in zip(step.src.tolist(), step.dst.tolist(), strict=True)]
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
def test_uneven_groups_with_several_messages_of_a_pair_hang_before_2_29_7_and_end_in_rounds(version):
    hanging = [
        messages for seed in range(8) if find_cycle(group_of(messages := uneven(seed, 4, 800), 4), Rules(version))
    ]
    assert hanging
    for messages in hanging:
        assert all(find_cycle(group_of(some, 4), Rules(version)) is None for some in in_rounds(messages))
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


def test_only_these_schedules_have_two_messages_of_a_pair_in_a_step():
    schedules = {
        (name, ranks): schedule
        for collective in COLLECTIVES
        for ranks in (2, 3, 5, 8, 12)
        for name, schedule in candidates(collective, ranks).items()
    } | {(name, ranks): by_name(name).schedule(0, ranks) for name in ALGORITHMS for ranks in (2, 3, 5, 8, 12)}
    most = Counter()
    for (name, _), schedule in schedules.items():
        for step in schedule.steps():
            pairs = Counter(zip(step.src.tolist(), step.dst.tolist(), strict=True))
            most[name] = max(most[name], *pairs.values(), 0)
    assert {name for name, count in most.items() if count > 1} == {"bruck", "dissemination", "double_tree", "rings"}
    assert max(most.values()) == 2


def test_messages_of_a_pair_travel_in_as_many_rounds_alike_on_both_ends():
    tensors = [torch.full((1,), float(number)) for number in range(5)]
    there = P2PGroup([P2PMessage(1, tensors[0]), P2PMessage(2, tensors[1]), P2PMessage(1, tensors[2])], [], hop=7)
    here = P2PGroup([], [P2PMessage(0, tensors[3]), P2PMessage(0, tensors[4])], hop=7)
    assert [[each.peer for each in some.sends] for some in there.rounds] == [[1, 2], [1]]
    assert [[each.data for each in some.recvs] for some in here.rounds] == [[tensors[3]], [tensors[4]]]
    assert {some.hop for some in there.rounds} == {7}
    assert P2PGroup([], []).rounds == []


@pytest.mark.parametrize(("algorithm", "groups"), [(Ring(), [1]), (DoubleTree(), [1, 2])])
def test_a_hop_is_one_group_of_nccl_unless_a_pair_has_several_messages(algorithm, groups, monkeypatch):
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


SMALL = Rules(22809, channels=4, channels_per_peer=1, arguments_nbytes=48)
"""A kernel takes three batches."""


def small_messages(seed):
    draw = random.Random(seed)
    pairs = ((draw.randrange(5), draw.randrange(5)) for _ in range(80))
    return [(one, other, 4) for one, other in pairs if one != other]


def exchanged(messages, timeout_s):
    """Let 5 ranks exchange `messages` in one hop, of which the k-th carries k; return what came, by its number."""

    def body(world):
        ours = [(number, one, other) for number, (one, other, _) in enumerate(messages) if world.rank in (one, other)]
        sends = [P2PMessage(other, torch.tensor([float(number)])) for number, one, other in ours if one == world.rank]
        places = {number: torch.zeros(1) for number, _, other in ours if other == world.rank}
        recvs = [P2PMessage(messages[number][0], place) for number, place in places.items()]
        world.comm_thread.run(lambda: world.transport.bind(P2PGroup(sends, recvs))(Tag(0, 0))).result()
        return places

    found = run_ranks(5, body, timeout_s, connect=over_nccl)
    return {number: place.item() for places in found for number, place in places.items()}


HANGING = [seed for seed in range(8) if find_cycle(group_of(small_messages(seed), 5), SMALL)]


@pytest.mark.parametrize("seed", HANGING[:2])
def test_what_hangs_in_the_model_hangs_in_the_stand_in_unless_it_travels_in_rounds(seed, monkeypatch):
    messages = small_messages(seed)
    with cutting(SMALL):
        assert exchanged(messages, 20.0) == {number: number for number in range(len(messages))}
        monkeypatch.setattr(P2PGroup, "rounds", property(lambda group: [group]))
        with pytest.raises(DeadlineExceeded):
            exchanged(messages, 1.0)


def test_what_does_not_hang_in_the_model_ends_in_the_stand_in(monkeypatch):
    ending = [
        seed for seed in range(20) if seed not in HANGING and not find_cycle(group_of(small_messages(seed), 5), SMALL)
    ]
    monkeypatch.setattr(P2PGroup, "rounds", property(lambda group: [group]))
    with cutting(SMALL):
        for messages in map(small_messages, ending[:3]):
            assert exchanged(messages, 20.0) == {number: number for number in range(len(messages))}


@pytest.mark.parametrize("ranks", [3, 5, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_schedule_ends_where_kernels_take_three_batches(collective, ranks):
    def body(world):
        for schedule in candidates(collective, ranks).values():
            world.run(schedule, torch.ones(2 * schedule.chunks))

    with cutting(SMALL):
        run_ranks(ranks, body, connect=over_nccl)


def test_an_all_to_all_of_uneven_pieces_ends_where_kernels_take_three_batches():
    sizes = {(one, other): (7 * one + 3 * other) % 5 for one in range(8) for other in range(8)}  # some are empty

    def body(world):
        rank = world.rank
        sends = [P2PMessage(to, torch.full((sizes[rank, to],), float(rank))) for to in range(8) if to != rank]
        recvs = [P2PMessage(source, torch.zeros(sizes[source, rank])) for source in range(8) if source != rank]
        world.comm_thread.run(lambda: world.transport.bind(P2PGroup(sends, recvs))(Tag(0, 0))).result()
        return all((message.data == message.peer).all() for message in recvs)

    with cutting(SMALL):
        assert all(run_ranks(8, body, connect=over_nccl))


def test_a_batch_of_torch_distributed_ends_where_kernels_take_three_batches(monkeypatch):
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
        assert all(run_ranks(5, body, connect=over_nccl))
