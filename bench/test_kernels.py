# SPDX-License-Identifier: Apache-2.0
"""The kernels beside what torch ships, each task in turn by all contenders, and beside the fastest plain copy.

On a GPU: graph replays with cold and hot caches, single launches, and the host's time. Without one, the definitions in
plain torch take the kernels' place, on small sets: those figures say nothing about the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from platform import processor

import pytest
import torch
from contenders import OURS, TASKS, flat_copies
from interleaved import Clock, Times, record, spread, table
from stopwatch import HAS_GPU, MODES, stopwatch

ROUNDS = 30 if HAS_GPU else 3
CEILING_NBYTES = (64 << 20, 1 << 28, 1 << 30) if HAS_GPU else (1 << 20,)
CLOCK = Clock()


def clock() -> float:
    """What pytest-benchmark reads: the time that was measured in the interleaved rounds."""
    return CLOCK.now_s


@cache
def ceiling_bytes_per_s() -> float:
    """Reads and writes of the fastest way to copy a large row, in this process."""
    mode = next(iter(MODES))
    best = 0.0
    for nbytes in CEILING_NBYTES:
        watches = [stopwatch(mode, run, 2, calls_of(nbytes)) for run in flat_copies(nbytes).values()]
        seconds = min(spread([watch() for _ in range(ROUNDS)])[1] for watch in watches)
        best = max(best, 2 * nbytes / seconds)
    return best


@pytest.fixture(scope="module", params=[(task, mode) for task in TASKS for mode in MODES], ids=", ".join)
def measured(request: pytest.FixtureRequest) -> Iterator[tuple[int, Times]]:
    """(bytes to move, seconds of every contender and round) of one task; the tensors are gone afterwards."""
    name, mode = request.param
    task = TASKS[name]()
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


def calls_of(nbytes: int) -> int:
    """Calls in one measurement: a few milliseconds on a GPU."""
    return 2 if not HAS_GPU else 20 if nbytes < 1 << 30 else 4


def fastest_peer(times: Times) -> str:
    """Who else is fastest, by the median."""
    return min((who for who in times if not who.startswith(OURS)), key=lambda who: spread(times[who])[1])


@pytest.mark.benchmark(timer=clock)
def test_move_gradients(benchmark, measured: tuple[int, Times], request: pytest.FixtureRequest):
    nbytes, times = measured
    task, mode = request.node.callspec.params["measured"]
    benchmark.group = f"{task}: {mode}"
    row = record(times, OURS, fastest_peer(times))
    bytes_per_s = nbytes / row["median_s"]
    benchmark.extra_info.update(
        row,
        task=task,
        mode=mode,
        nbytes=nbytes,
        gb_per_s=bytes_per_s / 1e9,
        copy_gb_per_s=ceiling_bytes_per_s() / 1e9,
        fraction_of_copy=bytes_per_s / ceiling_bytes_per_s(),
        medians_s={who: spread(seconds)[1] for who, seconds in times.items()},
        device=torch.cuda.get_device_name() if HAS_GPU else f"no GPU, {processor()}",
        torch=torch.__version__,
    )
    benchmark.pedantic(CLOCK.replay(times[OURS]), rounds=ROUNDS)
