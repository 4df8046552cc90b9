# SPDX-License-Identifier: Apache-2.0
"""Measure the kernels beside torch's functions, interleaved for each task, and beside the fastest plain copy.

On a GPU: graph replays with cold and hot caches, single launches, and the host's time. Without a GPU, the definitions
in plain torch replace the kernels, so the figures say nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from conftest import Keep
from gpu_timer import HAS_GPU, MODES, stopwatch
from interleaved import Clock, Times, spread, table
from kernel_variants import MORE_TASKS, OURS, TASKS, flat_copies, gate
from records import made

CLOCK = Clock()
ROUNDS = 30 if HAS_GPU else 5
NBYTES = (1 << 26, 1 << 28, 1 << 30) if HAS_GPU else (1 << 28,)
ALL = TASKS | MORE_TASKS
CASES = [(task, mode) for task in TASKS for mode in MODES] + [(task, next(iter(MODES))) for task in MORE_TASKS]


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the interleaved rounds."""
    return CLOCK.now_s


def calls_of(nbytes: int) -> int:
    """Return how many calls a measurement has: a few milliseconds' worth on a GPU."""
    if not HAS_GPU:
        return 1 if nbytes > 1 << 25 else 10
    return 20 if nbytes < 1 << 30 else 4


@cache
def copy_bytes_per_s() -> float:
    """Return the bytes that the fastest copy of buffers that no cache holds reads and writes per second."""
    mode, found = next(iter(MODES)), []
    for nbytes in NBYTES:
        for run in flat_copies(nbytes).values():
            watch = stopwatch(mode, run, 1, calls_of(nbytes))
            found.append(2 * nbytes / spread([watch() for _ in range(ROUNDS)])[1])
    return max(found)


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def measured(request: pytest.FixtureRequest) -> Iterator[tuple[int, Times]]:
    """Measure one task; return the bytes to move, and the seconds of every contender and round."""
    request.getfixturevalue("one_thread")
    name, mode = request.param
    task = ALL[name]()
    gate(task)
    able = {
        who: run for who, run in task.contenders.items() if not (mode.startswith("graph") and who in task.not_in_graphs)
    }
    if OURS not in able:
        pytest.skip("addresses cannot be sent inside of a graph")
    watches = {who: stopwatch(mode, run, task.sets, calls_of(task.nbytes)) for who, run in able.items()}
    times: Times = {who: [] for who in watches}
    for _ in range(ROUNDS):
        for who, watch in watches.items():
            times[who].append(watch())
    yield task.nbytes, times
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{name}: {mode}\n{table(times, dict.fromkeys(times, fastest_peer(times)))}")


def fastest_peer(times: Times) -> str:
    """Return the fastest other contender, by the median."""
    return min((who for who in times if not who.startswith(OURS)), key=lambda who: spread(times[who])[1])


@pytest.mark.benchmark(timer=clock)
def test_move_gradients(benchmark, measured: tuple[int, Times], request: pytest.FixtureRequest, keep: Keep):
    nbytes, times = measured
    task, mode = request.node.callspec.params["measured"]
    benchmark.group = f"{task}: {mode}"

    def rates(_: str, seconds: float) -> dict[str, float]:
        return {"gb_per_s": nbytes / seconds / 1e9, "of_copy": nbytes / seconds / copy_bytes_per_s()}

    peers = dict.fromkeys(times, fastest_peer(times))
    about = {"nbytes": nbytes, "copy_gb_per_s": copy_bytes_per_s() / 1e9}
    records = list(made("kernels", f"{task}: {mode}", times, peers, rates, **about))
    benchmark.extra_info.update(records[list(times).index(OURS)])
    keep(records)
    benchmark.pedantic(CLOCK.replay(times[OURS]), rounds=ROUNDS)
