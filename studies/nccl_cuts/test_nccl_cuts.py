# SPDX-License-Identifier: Apache-2.0
"""Which groups may wait for ever where NCCL cuts them into kernels, and that no group of commrt is cut."""

from __future__ import annotations

from itertools import chain

import pytest
from cases import for_each
from hanging_groups import VERSIONS
from hypothesis import given
from hypothesis import strategies as st
from nccl_messages import LARGE, fits_a_kernel, group_of, in_groups, messages_of, mixed, posted_in_groups, several
from nccl_plans import Call, Rules, cut, find_cycle

from commrt.algorithms import direct, halving_doubling
from commrt.algorithms.catalogue import COLLECTIVES, candidates
from commrt.nccl_groups import MOST_MESSAGES

SMALLEST_HANGING = [(2, 4, LARGE), (2, 5, LARGE), (3, 2, LARGE), (3, 4, LARGE), (3, 5, LARGE)]
"""Over InfiniBand, of 6 ranks on 3 hosts; hangs where a kernel takes two batches."""


def network(version=22907, ranks_per_node=8, **changed):
    """Hosts with InfiniBand, as NCCL uses it by default."""
    return Rules(version, ranks_per_node=ranks_per_node, **{"shares_connections": True} | changed)


def tiny(**changed):
    return network(ranks_per_node=2, channels=2, channels_per_peer=1, **changed)


def slow_but(fast, cases=VERSIONS):
    """`cases` as parameters, of which one is no slow test."""
    return [pytest.param(case, marks=[] if case == fast else pytest.mark.slow) for case in cases]


def hangs(messages, ranks, rules):
    return find_cycle(group_of(messages, ranks), rules) is not None


def is_uncut_and_ends(messages, ranks, rules):
    """In commrt's groups."""
    groups = [group_of(some, ranks) for some in in_groups(messages, ranks)]
    return all(fits_a_kernel(each, rules) and find_cycle(each, rules) is None for each in groups)


def test_a_group_that_fits_one_kernel_is_not_cut():
    assert len(cut(0, 4, [Call(peer, is_send, LARGE) for peer in (1, 2, 3) for is_send in (True, False)], Rules())) == 1


def test_a_call_without_its_other_end_is_refused():
    with pytest.raises(ValueError, match="rank 0 sends 1 times to rank 1, which receives 0 times"):
        find_cycle([[Call(1, True, 8)], []], Rules())


def test_the_circle_names_the_rank_whose_message_another_one_waits_for():
    now, later = (f"in plan {plan}, channel 1, batch 0" for plan in (0, 1))
    assert find_cycle(group_of(SMALLEST_HANGING, 6), tiny(arguments_nbytes=32)) == [
        f"rank 2 {now} sends to rank 4 together with rank 3, which does so {later} and is {now}",
        f"rank 3 {now} sends to rank 5 together with rank 2, which does so {later} and is {now}",
    ]


@pytest.mark.parametrize("version", slow_but(22809, VERSIONS[:-1]))
def test_groups_with_several_messages_of_a_pair_hang_before_2_29_7_but_not_in_groups_that_are_uncut(version):
    hanging = [each for seed in range(4) if hangs(each := several(seed, 4, 800), 4, Rules(version))]
    assert hanging
    for messages in hanging:
        assert is_uncut_and_ends(messages, 4, Rules(version))
        assert not hangs(messages, 4, Rules(VERSIONS[-1]))


@given(st.sampled_from(VERSIONS), st.sampled_from([None, 1, 2, 4]), st.integers(2, 9), st.data())
def test_within_a_host_no_cut_can_hang_where_a_pair_has_one_message(version, ranks_per_node, ranks, data):
    rank = st.integers(0, ranks - 1)
    pairs = data.draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])))
    messages = [(*pair, data.draw(st.sampled_from([0, 1000, 1 << 20, LARGE]))) for pair in sorted(pairs)]
    one_node = ranks_per_node is None or ranks % ranks_per_node
    assert not hangs(messages, ranks, Rules(version, 8, 4, None if one_node else ranks_per_node, False, 16 * 6))


@pytest.mark.parametrize("version", slow_but(22907))
@pytest.mark.parametrize("rules", [Rules, pytest.param(network, marks=pytest.mark.slow)])
def test_a_uniform_exchange_of_64_ranks_is_cut_and_ends(rules, version):
    messages = messages_of(next(iter(direct.all_gather(64).steps())), LARGE)
    is_uncut = fits_a_kernel(group_of(messages, 64), rules(version))
    assert is_uncut == (rules is Rules and version == 22707)  # which shares batches more freely
    assert not hangs(messages, 64, rules(version))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@for_each("from_root", [True, False])
def test_a_root_of_304_ranks_is_cut_alone_and_ends(version, from_root):
    messages = [(0, rank, LARGE) if from_root else (rank, 0, LARGE) for rank in range(1, 304)]
    groups = group_of(messages, 304)
    for rules in (Rules(version), network(version)):
        plans = [len(cut(rank, 304, groups[rank], rules)) for rank in (0, 1)]
        assert (plans[0] > 1, plans[1]) == (rules.shares_connections or version > 22707, 1)
        assert find_cycle(groups, rules) is None


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks", [33, 65, 127])
def test_folds_of_odd_counts_of_ranks_end(version, ranks):
    for step in halving_doubling.all_reduce(ranks).steps():
        assert not hangs(messages_of(step, LARGE), ranks, Rules(version))


def test_over_infiniband_the_smallest_group_that_hangs_needs_its_cut_its_connections_and_each_message():
    assert hangs(SMALLEST_HANGING, 6, tiny(arguments_nbytes=32))
    assert not hangs(SMALLEST_HANGING, 6, tiny())
    assert not hangs(SMALLEST_HANGING, 6, tiny(arguments_nbytes=32, shares_connections=False))
    for left_out in SMALLEST_HANGING:
        messages = [message for message in SMALLEST_HANGING if message != left_out]
        assert not hangs(messages, 6, tiny(arguments_nbytes=32))


@for_each("version", VERSIONS)
def test_the_smallest_group_that_hangs_ends_in_commrts_groups(version):
    assert is_uncut_and_ends(SMALLEST_HANGING, 6, tiny(version=version))


def test_ranks_of_one_host_share_no_connection_with_each_other():
    assert [network().connection(source, 8) for source in (0, 7, 9, 15, 16)] == [-1, -1, 9, 15, -3]
    assert [Rules(ranks_per_node=8).connection(source, 8) for source in (0, 7, 9)] == [0, 7, 9]
    assert [network(ranks_per_node=None).connection(source, 8) for source in (0, 7, 9)] == [0, 7, 9]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_over_infiniband_a_mixed_all_to_all_of_64_ranks_hangs_but_not_in_commrts_groups(version):
    assert hangs(mixed(0, 64), 64, network(version))
    assert is_uncut_and_ends(mixed(0, 64), 64, network(version))


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_it_ends_if_nothing_is_cut_and_batches_have_8_rounds_alike_on_all_ranks(version):
    assert hangs(mixed(0, 64), 64, network(version, arguments_nbytes=1 << 22)) == (version == 22707)


@pytest.mark.slow
def test_it_is_not_cut_with_the_fewer_channels_per_peer_that_nccl_takes_by_itself_from_2_29_2_on():
    rules = network(22902, channels_per_peer=4)
    assert fits_a_kernel(group_of(mixed(0, 64), 64), rules)
    assert not hangs(mixed(0, 64), 64, rules)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2, 4, 6, 8])
def test_commrts_groups_of_48_ranks_are_not_cut_and_end(version, ranks_per_node):
    messages = mixed(1, 48, density=0.6) + mixed(2, 48, density=0.1)
    assert is_uncut_and_ends(messages, 48, network(version, ranks_per_node))


@pytest.mark.parametrize("ranks_per_node", slow_but(4, [None, 4]))
@pytest.mark.parametrize("ranks", slow_but(8, [8, 16]))
def test_no_group_of_any_schedule_is_ever_cut(ranks, ranks_per_node):
    all_rules = [Rules(version, ranks_per_node=ranks_per_node) for version in VERSIONS]
    schedules = chain.from_iterable(candidates(collective, ranks).values() for collective in COLLECTIVES)
    steps = {step.text(10**6): step for schedule in schedules for step in schedule.steps()}
    for step in steps.values():
        for nbytes in (1 << 16, 1 << 19, LARGE):
            for some in in_groups(messages_of(step.canonical(), nbytes), ranks):
                assert all(fits_a_kernel(group_of(some, ranks), rules) for rules in all_rules)


@given(st.integers(2, 12), st.data())
def test_no_group_of_random_messages_is_ever_cut(ranks, data):
    rank = st.integers(0, ranks - 1)
    pairs = data.draw(st.lists(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=150))
    messages = [(*pair, data.draw(st.sampled_from([8, 1 << 16, 1 << 18, 1 << 22, LARGE]))) for pair in pairs]
    per_node = data.draw(st.sampled_from([None, *(each for each in (1, 2, 4) if ranks % each == 0)]))
    rules = Rules(data.draw(st.sampled_from(VERSIONS)), ranks_per_node=per_node)
    groups = in_groups(messages, ranks)
    assert all(fits_a_kernel(group_of(some, ranks), rules) for some in groups)
    assert sorted(chain.from_iterable(groups)) == sorted(messages)


@for_each("version", VERSIONS)
def test_messages_that_are_posted_without_a_schedule_are_in_groups_that_are_not_cut(version):
    messages = several(0, 6, 400)
    for rank, groups in enumerate(posted_in_groups(messages, 6)):
        assert len(groups) > 1
        assert all(len(cut(rank, 6, calls, Rules(version))) == 1 for calls in groups)


@for_each("version", VERSIONS[1:])
@for_each(("nbytes", "most"), [(LARGE, MOST_MESSAGES), (1 << 19, 3 * MOST_MESSAGES)])
def test_a_kernel_takes_as_many_messages_as_a_group_may_have_even_if_no_two_share_a_batch(version, nbytes, most):
    rules = Rules(version, ranks_per_node=1)
    peers = [distance for (distance, _), number in rules.rounds(512).items() if number and number % 8 == 0]
    assert len(cut(0, 512, [Call(peer, True, nbytes) for peer in peers[:most]], rules)) == 1
    assert len(cut(0, 512, [Call(peer, True, LARGE) for peer in peers[: MOST_MESSAGES + 1]], rules)) == 2
