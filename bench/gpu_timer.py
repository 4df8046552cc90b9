# SPDX-License-Identifier: Apache-2.0
"""Measure times on a GPU by its own clock, replayed from a graph or called, and how long the host is busy.

Every call takes the number of a set of tensors, another one each time, so that no cache holds it. Without a GPU there
is only the host's clock. Notice what must not happen in a step: allocations of device memory, and waits of the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

HAS_GPU = torch.cuda.is_available()
SPIN_CYCLES = 2_000_000
"""Cycles of about 1 ms that keep the GPU busy while the host queues the measured calls."""

Run = Callable[[int], object]
"""Runs the measured function on set number i."""
Stopwatch = Callable[[], float]
"""Returns the mean seconds of several calls."""


def stopwatch(mode: str, run: Run, sets: int, calls: int) -> Stopwatch:
    """Return a function that measures `run` in `mode`, `calls` at a time. Runs it once for each set first."""
    for number in range(sets):
        run(number)
    numbers = [0] * calls if mode.endswith("hot") else [call % sets for call in range(calls)]
    return MODES[mode](run, numbers)


def _called(run: Run, numbers: list[int]) -> Stopwatch:
    """Measure by the host's clock, on the CPU."""

    def measure() -> float:
        begin_s = perf_counter()
        for number in numbers:
            run(number)
        return (perf_counter() - begin_s) / len(numbers)

    return measure


def _queued(run: Run, numbers: list[int]) -> Stopwatch:
    """Measure the host's time until a call returns. The GPU is idle before each call, so no queue is full."""

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
    """Measure by the GPU's clock, with launches one by one behind a spin."""

    def work() -> None:
        for number in numbers:
            run(number)

    return _between_events(work, len(numbers))


def _replayed(run: Run, numbers: list[int]) -> Stopwatch:
    """Measure by the GPU's clock, as one graph, without the host between launches."""
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
"""Ways to measure, by name. Cold uses another set at each call, hot always the same one."""


def allocations() -> int:
    """Return the number of allocations of device memory so far."""
    return torch.cuda.memory_stats()["allocation.all.allocated"] if HAS_GPU else 0


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let torch raise where it would wait for the device."""
    if not HAS_GPU:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
