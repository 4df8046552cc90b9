# SPDX-License-Identifier: Apache-2.0
"""How long something takes on a GPU: by its own clock, replayed from a graph or called; and how long the host is busy.

Everything is called with the number of a set of tensors, and takes another one each time, so that none is in a cache.
Without a GPU there is only the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

__all__ = ["HAS_GPU", "MODES", "Run", "Stopwatch", "stopwatch"]

HAS_GPU = torch.cuda.is_available()
SPIN_CYCLES = 2_000_000
"""About 1 ms in which the GPU is busy while the host queues what is measured."""

Run = Callable[[int], object]
"""Do it, to set number i."""
Stopwatch = Callable[[], float]
"""Seconds of one call, the mean of several."""


def stopwatch(mode: str, run: Run, sets: int, calls: int) -> Stopwatch:
    """How to measure `run` in `mode`, `calls` at a time; runs it once for each set first."""
    for number in range(sets):
        run(number)
    numbers = [0] * calls if mode.endswith("hot") else [call % sets for call in range(calls)]
    return MODES[mode](run, numbers)


def _called(run: Run, numbers: list[int]) -> Stopwatch:
    """By the host's clock, on the CPU."""

    def measure() -> float:
        begin_s = perf_counter()
        for number in numbers:
            run(number)
        return (perf_counter() - begin_s) / len(numbers)

    return measure


def _queued(run: Run, numbers: list[int]) -> Stopwatch:
    """The host's time until its call returns; the GPU is idle before each, so that no queue is ever full."""

    def measure() -> float:
        spent_s = 0.0
        for number in numbers:
            torch.cuda.synchronize()
            begin_s = perf_counter()
            run(number)
            spent_s += perf_counter() - begin_s
        return spent_s / len(numbers)

    return measure


def _eager(run: Run, numbers: list[int]) -> Stopwatch:
    """By the GPU's clock, launched one by one behind a spin."""

    def work() -> None:
        for number in numbers:
            run(number)

    return _between_events(work, len(numbers))


def _replayed(run: Run, numbers: list[int]) -> Stopwatch:
    """By the GPU's clock, as one graph: no host between launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in numbers:
            run(number)
    graph.replay()
    return _between_events(graph.replay, len(numbers))


def _between_events(work: Callable[[], object], calls: int) -> Stopwatch:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> float:
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    return measure


ON_GPU = {"graph, cold": _replayed, "graph, hot": _replayed, "eager, cold": _eager, "host": _queued}
MODES: dict[str, Callable[[Run, list[int]], Stopwatch]] = ON_GPU if HAS_GPU else {"called": _called}
"""By name: cold means another set at each call, hot always the same one."""
