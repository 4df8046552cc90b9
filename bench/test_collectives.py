# SPDX-License-Identifier: Apache-2.0
"""Measure torch.distributed's collectives on 4 processes of this machine: the backend commrt beside Gloo.

Both run interleaved in one job; `collectives_worker` is what a rank does. Read ratios, not milliseconds.
"""

from __future__ import annotations

import multiprocessing
import socket

import pytest
from collectives_worker import COLLECTIVES, SIZES, CollectivesJob, name_of, work
from interleaved import Clock, Times, record, table
from records import append, made
from step_worker import HOST
from torch.multiprocessing import spawn

CLOCK = Clock()
PEERS = {
    name_of(collective, size, which): name_of(collective, size, "gloo")
    for collective in COLLECTIVES
    for size in SIZES
    for which in ("commrt", "gloo")
}


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the job."""
    return CLOCK.now_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """Run the job once for this file; return the seconds of every variant and round."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.create_server((HOST, 0)) as server:
        job = CollectivesJob(server.getsockname()[1])
    spawn(work, (job, answers), nprocs=job.ranks)
    measured = answers.get()
    for collective in COLLECTIVES:
        ours = {name: peer for name, peer in PEERS.items() if name.startswith(f"{collective},")}
        append(request.config.getoption("--records"), made("collectives", collective, measured, ours))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{job.ranks} processes, {job.rounds} rounds\n{table(measured, PEERS)}")
    return measured


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="collectives", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_a_collective_of_torch_distributed(benchmark, times: Times, variant: str):
    benchmark.extra_info.update(record(times, variant, PEERS[variant]))
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=len(times[variant]))
