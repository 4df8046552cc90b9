# SPDX-License-Identifier: Apache-2.0
"""In which order schedules add: one order for all elements, or several, and then two chunks that differ."""

from __future__ import annotations

import pytest
import torch

from commrt.algorithms import Direct, DoubleTree
from commrt.algorithms.catalogue import ALGORITHMS, by_name, candidates
from commrt.errors import UsageError
from commrt.proof import order_of_additions
from commrt.schedule import ADD, MIX, Schedule, Step
from commrt.testing.ranks import run_ranks

RANKS = (*range(1, 10), 12, 15, 16, 17)
POWERS = (1, 2, 4, 8, 16)
ONE_ORDER = {
    ("reduce", "tree"): RANKS,
    ("reduce", "direct"): RANKS,
    ("reduce", "chain"): RANKS,
    ("reduce", "scatter_gather"): (1, 2),
    ("reduce_scatter", "ring"): (1, 2),
    ("reduce_scatter", "halving"): RANKS,
    ("reduce_scatter", "bruck"): POWERS,
    ("reduce_scatter", "direct"): RANKS,
    ("all_reduce", "ring"): (1, 2),
    ("all_reduce", "halving_doubling"): POWERS,
    ("all_reduce", "torus2d"): (1, 2, 4),
    ("all_reduce", "doubling"): RANKS,
    ("all_reduce", "double_tree"): (1, 2),
    ("all_reduce", "direct"): RANKS,
}
"""For how many ranks a schedule adds all elements in one order."""


@pytest.mark.parametrize("name", ONE_ORDER, ids=" ".join)
def test_a_schedule_adds_in_one_order_for_these_counts_of_ranks(name):
    collective, schedule = name
    found = {ranks: candidates(collective, ranks).get(schedule) for ranks in RANKS}
    offered = {ranks: each for ranks, each in found.items() if each is not None}
    assert {ranks for ranks, each in offered.items() if order_of_additions(each).is_one} == {
        *ONE_ORDER[name]
    } & offered.keys()


def test_sums_within_hosts_first_have_one_order_too():
    for algorithm, ranks in ((Direct(within=2), 8), (Direct(within=4), 12), (DoubleTree(within=2), 4)):
        assert order_of_additions(algorithm.schedule(0, ranks)).is_one, algorithm


@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "all_to_all", "gather", "scatter"])
def test_what_only_copies_adds_nothing(collective):
    for schedule in candidates(collective, 6).values():
        assert str(order_of_additions(schedule)) == "adds nothing"


def ends_of(schedule, draws):
    """What ranks hold after `schedule` if all chunks begin alike, [ranks, chunks, draws]."""

    def body(world):
        source = torch.Generator().manual_seed(world.rank)
        buffer = torch.randn(draws, generator=source).repeat(schedule.chunks)
        world.run(schedule, buffer)
        return buffer.view(schedule.chunks, draws)

    return torch.stack(run_ranks(schedule.ranks, body))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_chunks_with_equal_contributions_end_with_equal_bits_exactly_where_there_is_one_order(name):
    for ranks in (3, 4, 5, 6):
        schedule = by_name(name).schedule(0, ranks)
        ends, found = ends_of(schedule, 400), order_of_additions(schedule)
        assert bool((ends == ends[:1, :1]).all()) == found.is_one, ranks
        if not found.is_one:
            one, other = found.chunks
            assert (ends[0, one] != ends[0, other]).any(), "the chunks that are named differ"


def test_ranges_that_one_message_carries_are_added_as_one():
    """Rank 0 receives chunks 0 and 1 of rank 1 as one range, after chunk 0 of rank 2 alone."""
    step = Step.of([1, 1, 2], 0, [0, 1, 0], [1, 2, 1], ADD)
    schedule = Schedule("merged", 3, 2, lambda: iter([step]))
    assert str(order_of_additions(schedule)) == "one order for all elements: (1 + (0 + 2))"


def test_an_order_is_shown_as_sums_in_brackets():
    chain = Schedule("chain", 3, 1, lambda: iter([Step.of([2], [1], 0, 1, ADD), Step.of([1], [0], 0, 1, ADD)]))
    assert str(order_of_additions(chain)) == "one order for all elements: (0 + (1 + 2))"
    at_once = Schedule("at once", 3, 1, lambda: iter([Step.of([1, 2], [0, 0], 0, 1, ADD)]))
    assert str(order_of_additions(at_once)) == "one order for all elements: (0 + 1 + 2)"


def test_a_schedule_that_mixes_has_no_sum():
    half = Schedule("half", 2, 1, lambda: iter([Step.of([0, 1], [1, 0], 0, 1, MIX, 0.5)]))
    with pytest.raises(UsageError, match="half mixes, so what ranks end with is no sum"):
        order_of_additions(half)
