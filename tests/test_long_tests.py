# SPDX-License-Identifier: Apache-2.0
"""The order of tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from long_tests import LONG, first


@dataclass(frozen=True)
class Item:
    """A test of pytest's, as far as it matters here."""

    nodeid: str


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_each_worker_begins_with_one_of_the_longest_tests_and_none_is_lost(workers):
    items = [Item(f"short {number}") for number in range(83)] + [Item(part) for part in reversed(LONG)]
    found = first(items, workers)
    assert len(found) == len(items)
    assert {*found} == {*items}
    left, begins = len(items), []
    for worker in range(workers):  # as xdist deals them
        begins.append(len(items) - left)
        left -= left // (workers - worker)
    assert [found[begin].nodeid for begin in begins] == [*LONG[:workers]]


def test_where_almost_all_tests_are_long_none_is_lost():
    items = [Item(f"{LONG[0]} {number}") for number in range(7)] + [Item("short")]
    assert {*first(items, 4)} == {*items}
