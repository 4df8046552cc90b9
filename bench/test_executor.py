# SPDX-License-Identifier: Apache-2.0
"""Measure what an exchange costs the host, beside ``batch_isend_irecv``, and with transfers that take no time.

Three processes make two sends and two receives of 1 KiB, all variants interleaved in one job; `issue_worker` is what a
rank does. Read ratios.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from conftest import Keep
from host_times import Null
from interleaved import Clock, Times, record, spread, table
from issue_worker import PEERS, RANKS, work
from records import append, made, provenance
from test_step import free_port
from torch.multiprocessing import spawn

from commrt.algorithms import ring
from commrt.kernels.layout import GRANULE
from commrt.program import program
from commrt.runtime.executor import bind
from commrt.transport.protocol import Tag

CLOCK = Clock()
TAG = Tag(0, 0)
CASE = "2 sends and 2 receives of 1 KiB"
IDLE = "transfers that take no time"


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the job."""
    return CLOCK.now_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """Run the job once for this file; return the mean seconds of a call by variant and round."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(work, (free_port(), answers), nprocs=RANKS)
    measured: Times = answers.get()
    append(request.config.getoption("--records"), made("executor", CASE, measured, PEERS))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{CASE}, {RANKS} processes, per call\n{table(measured, PEERS, 'us')}")
    return measured


@pytest.mark.timeout(300)
@pytest.mark.benchmark(group="exchange", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_exchange_with_two_peers(benchmark, times: Times, variant: str):
    benchmark.extra_info.update(record(times, variant, PEERS[variant]))
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=len(times[variant]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.benchmark(group="run")
def test_run_a_ring_of_8_ranks_whose_transfers_take_no_time(benchmark, keep: Keep):
    mine = program(ring.all_reduce(8), 0)
    bound = bind(mine, torch.zeros(mine.chunks * GRANULE), Null(0, 8))
    benchmark(bound.run, TAG)
    transfers = sum(len(hop.sends) + len(hop.recvs) for hop in mine.hops)
    if benchmark.stats:  # None under --benchmark-disable
        low, middle, high = (each / transfers for each in spread(benchmark.stats.stats.data))
        seconds = {"quantile20_s": low, "median_s": middle, "quantile80_s": high}
        keep([{"suite": "executor", "case": IDLE, "variant": "a transfer, ring of 8", **seconds, **provenance()}])
