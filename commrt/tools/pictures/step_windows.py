# SPDX-License-Identifier: Apache-2.0
"""What recorded timelines say of steps: when each was, and how long ranks computed in it.

Pure functions of the ranges that `timelines` reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from commrt.tools.pictures.timelines import TimelineSpan

WARMUP_STEPS = 3
"""The first steps, in which programs are made."""


class StepWindow(NamedTuple):
    """When a step of all ranks was."""

    step: int
    begin_ms: float
    end_ms: float

    @property
    def width_ms(self) -> float:
        """Its duration."""
        return self.end_ms - self.begin_ms


def compute_times_s(spans: Sequence[TimelineSpan]) -> list[list[float]]:
    """Return [steps][ranks] seconds from begin of forward to end of backward pass, without waits.

    The list has as many steps as every rank has made, without the first `WARMUP_STEPS`.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    begin_ms = dict[int, float]()
    # inner ranges before outer ones
    for span in sorted(spans, key=lambda span: (span.end_ms, -span.begin_ms)):
        if span.name == "forward":
            begin_ms[span.rank] = span.begin_ms
        elif span.rank in begin_ms and span.name == "wait":
            begin_ms[span.rank] += span.end_ms - span.begin_ms
        elif span.rank in begin_ms and span.name == "backward":
            by_rank[span.rank].append((span.end_ms - begin_ms.pop(span.rank)) / 1e3)
    return [
        list(step)
        for step in zip(*(by_rank[rank][WARMUP_STEPS:] for rank in sorted(by_rank)), strict=False)
    ]


def step_windows(spans: Sequence[TimelineSpan]) -> list[StepWindow]:
    """Return steps, each from the first rank to end the one before to the last rank to end it."""
    # by rank, the ends of its optimizer steps in ms
    updates: defaultdict[int, list[float]] = defaultdict(list)
    ends_ms: defaultdict[int, list[float]] = defaultdict(list)  # by step
    for span in sorted(spans, key=lambda span: span.end_ms):
        if span.name == "optimizer":
            updates[span.rank].append(span.end_ms)
    for span in spans:
        if span.name == "wait" and span.step is not None:
            ends_ms[span.step].append(
                next((end for end in updates[span.rank] if end > span.end_ms), span.end_ms)
            )
    # waits of gossip and DDP have no step number: count the optimizer's steps of each rank
    if not ends_ms:
        for rank_ends_ms in updates.values():
            for step, end_ms in enumerate(rank_ends_ms):
                ends_ms[step].append(end_ms)
    return [
        StepWindow(step, min(ends_ms[before]), max(ends_ms[step]))
        for before, step in pairwise(sorted(ends_ms))
    ]


def typical(windows: Sequence[StepWindow]) -> StepWindow:
    """Return a step of median duration, of those after the first."""
    late = windows[WARMUP_STEPS:] or windows
    middle_ms = median_low(window.width_ms for window in late)
    return next(window for window in late if window.width_ms == middle_ms)
