# SPDX-License-Identifier: Apache-2.0
"""Combinations of options that hold each pair of values, in place of their product."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

__all__ = ["pairwise"]


def pairwise(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows of one value of each option; any two values of two options meet in one row at least."""
    options = [[*choice] for choice in choices]
    rows = [*product(*(range(len(option)) for option in options))]
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        left -= _pairs(best)
        chosen.append(tuple(option[place] for option, place in zip(options, best, strict=True)))
    return chosen


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {*combinations(enumerate(row), 2)}
