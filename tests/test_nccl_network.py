# SPDX-License-Identifier: Apache-2.0
"""Over InfiniBand, receives from ranks of one host wait for each other: which groups of NCCL may then hang."""

from __future__ import annotations

import random

import pytest
from nccl_messages import group_of, in_groups, messages_of
from nccl_plans import Rules, cut, find_cycle

from commrt.algorithms import direct

VERSIONS = (22707, 22809, 22902, 22907, 23007)
LARGE = 1 << 26
SMALLEST_HANGING = [(2, 4, LARGE), (2, 5, LARGE), (3, 2, LARGE), (3, 4, LARGE), (3, 5, LARGE)]
"""Of 6 ranks on 3 hosts; hangs where a kernel takes two batches."""


def network(version=23007, ranks_per_node=8, **changed):
    return Rules(version, ranks_per_node=ranks_per_node, **{"shares_connections": True} | changed)


def tiny(**changed):
    return network(ranks_per_node=2, channels=2, channels_per_peer=1, **changed)


def uneven(seed, ranks, density=1.0):
    """Return messages of random sizes, from each rank to a part of the others."""
    draw = random.Random(seed)
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    sizes = (1000, 1 << 18, 1 << 22, LARGE)
    return [(*pair, draw.choice(sizes)) for pair in pairs if draw.random() < density]


def assert_is_not_cut_and_ends(messages, ranks, rules):
    groups = group_of(messages, ranks)
    assert is_uncut(groups, rules)
    assert find_cycle(groups, rules) is None


def is_uncut(groups, rules):
    return all(len(cut(rank, len(groups), calls, rules)) == 1 for rank, calls in enumerate(groups))


def test_the_circle_names_the_rank_whose_message_another_one_waits_for():
    now, later = (f"in plan {plan}, channel 1, batch 0" for plan in (0, 1))
    assert find_cycle(group_of(SMALLEST_HANGING, 6), tiny(arguments_nbytes=32)) == [
        f"rank 2 {now} sends to rank 4 together with rank 3, which does so {later} and is {now}",
        f"rank 3 {now} sends to rank 5 together with rank 2, which does so {later} and is {now}",
    ]


@pytest.mark.parametrize(
    "rules",
    [tiny(), tiny(arguments_nbytes=32, shares_connections=False)],
    ids=["uncut", "cut, with a connection for each pair"],
)
def test_the_smallest_group_that_hangs_ends_otherwise(rules):
    assert find_cycle(group_of(SMALLEST_HANGING, 6), rules) is None


@pytest.mark.parametrize("left_out", SMALLEST_HANGING)
def test_the_smallest_group_that_hangs_needs_each_of_its_messages(left_out):
    messages = [message for message in SMALLEST_HANGING if message != left_out]
    assert find_cycle(group_of(messages, 6), tiny(arguments_nbytes=32)) is None


def test_ranks_of_one_host_share_no_connection_with_each_other():
    assert [network().connection(source, 8) for source in (0, 7, 9, 15, 16)] == [-1, -1, 9, 15, -3]
    assert [Rules(ranks_per_node=8).connection(source, 8) for source in (0, 7, 9)] == [0, 7, 9]
    assert [network(ranks_per_node=None).connection(source, 8) for source in (0, 7, 9)] == [0, 7, 9]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_uneven_all_to_all_of_64_ranks_in_one_group_hangs(version):
    assert find_cycle(group_of(uneven(0, 64), 64), network(version))


@pytest.mark.parametrize("version", [22707, 22809, 23007])
def test_it_ends_if_nothing_is_cut_and_batches_have_8_rounds_alike_on_all_ranks(version):
    found = find_cycle(group_of(uneven(0, 64), 64), network(version, arguments_nbytes=1 << 22))
    assert (found is None) == (version > 22707)


def test_it_is_not_cut_with_the_fewer_channels_per_peer_that_nccl_takes_by_itself_from_2_29_2_on():
    assert_is_not_cut_and_ends(uneven(0, 64), 64, network(22902, channels_per_peer=4))


@pytest.mark.parametrize("version", VERSIONS)
def test_it_ends_in_groups_of_which_none_is_cut(version):
    for messages in in_groups(uneven(0, 64), 64):
        assert_is_not_cut_and_ends(messages, 64, network(version))


@pytest.mark.parametrize("rules", [tiny(version=version) for version in VERSIONS], ids=str)
def test_the_smallest_group_that_hangs_ends_in_groups(rules):
    for messages in in_groups(SMALLEST_HANGING, 6):
        assert_is_not_cut_and_ends(messages, 6, rules)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2, 4, 6, 8])
def test_groups_of_48_ranks_are_not_cut_and_end(version, ranks_per_node):
    for messages in in_groups(uneven(1, 48, density=0.6) + uneven(2, 48, density=0.1), 48):
        assert_is_not_cut_and_ends(messages, 48, network(version, ranks_per_node))


@pytest.mark.slow
@pytest.mark.parametrize("version", [22707, 22809, 23007])
def test_uniform_exchanges_of_64_ranks_are_cut_and_end(version):
    step = next(iter(direct.all_gather(64).steps()))
    messages = messages_of(step, LARGE)
    groups = group_of(messages, 64)
    assert len(cut(0, 64, groups[0], network(version))) > 1
    assert find_cycle(groups, network(version)) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("from_root", [True, False])
def test_a_root_of_304_ranks_on_38_hosts_ends(version, from_root):
    messages = [(0, rank, LARGE) if from_root else (rank, 0, LARGE) for rank in range(1, 304)]
    groups = group_of(messages, 304)
    assert [len(cut(rank, 304, groups[rank], network(version))) > 1 for rank in (0, 1)] == [True, False]
    assert find_cycle(groups, network(version)) is None
