# SPDX-License-Identifier: Apache-2.0
"""What it costs the host to start an exchange with two peers: this project beside ``batch_isend_irecv``.

All variants run in one job of three processes, in turn; `issue_worker` is what a rank does. Read ratios.
"""

from __future__ import annotations

import multiprocessing

import pytest
from interleaved import Clock, Times, record, table
from issue_worker import PEERS, RANKS, work
from test_step import free_port
from torch.multiprocessing import spawn

CLOCK = Clock()


def clock() -> float:
    """What pytest-benchmark reads: the time that the job took when it ran."""
    return CLOCK.now_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """The mean seconds of a call by variant and round; runs the job once for all benchmarks of this file."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(work, (free_port(), answers), nprocs=RANKS)
    measured: Times = answers.get()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n2 sends and 2 receives of 1 KiB, {RANKS} processes, per call\n{table(measured, PEERS, 'us')}")
    return measured


@pytest.mark.timeout(300)
@pytest.mark.benchmark(group="issue", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_start_an_exchange_with_two_peers(benchmark, times: Times, variant: str):
    benchmark.extra_info.update(record(times, variant, PEERS[variant]))
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=len(times[variant]))
