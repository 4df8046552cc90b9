# SPDX-License-Identifier: Apache-2.0
"""Whole for all or lost for all, whoever dies or is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from commrt.members.vote import Vote

PATIENT_S = 20.0


def votes(said, timeout_s=PATIENT_S, are_gone=lambda ranks: False):
    """The outcomes of members who say so; None is silent."""
    store, members = HashStore(), range(len(said))
    speakers = [rank for rank in members if said[rank] is not None]
    with ThreadPoolExecutor(len(said)) as pool:
        return set(pool.map(lambda rank: Vote(store, rank, members, timeout_s, are_gone).outcome(said[rank]), speakers))


@given(st.lists(st.booleans(), min_size=1, max_size=7))
def test_what_all_came_through_is_whole_and_nothing_else(said):
    assert votes(said) == {all(said)}


def test_what_all_have_read_is_gone_from_the_store():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda rank: Vote(store, rank, range(3), PATIENT_S, lambda _: False).outcome(True), range(3)))
    assert store.num_keys() == 0


@pytest.mark.parametrize("marks", [["1.0", "1.0"], ["1.0", "2.0"], ["1.0", "1.1"]])
def test_what_ranks_with_different_marks_came_through_is_lost_for_all(marks):
    store = HashStore()

    def outcome(rank):
        return Vote(store, rank, range(2), PATIENT_S, lambda ranks: False, marks[rank]).outcome(came_through=True)

    with ThreadPoolExecutor(2) as pool:
        assert {*pool.map(outcome, range(2))} == {len({*marks}) == 1}


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_member_that_says_nothing_did_not_come_through(silent):
    said = [True] * 3
    said[silent] = None
    assert votes(said, timeout_s=0.2) == {False}


@pytest.mark.parametrize("silent", [0, 2])
def test_a_member_that_is_gone_is_not_waited_for(silent):
    said = [True] * 3
    said[silent] = None
    begin_s = monotonic()
    assert votes(said, are_gone=lambda ranks: silent in ranks) == {False}
    assert monotonic() - begin_s < PATIENT_S / 2


def test_one_that_lost_somebody_waits_for_nobody():
    assert votes([None, False, None]) == {False}
