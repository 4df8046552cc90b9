# SPDX-License-Identifier: Apache-2.0
"""Measure the average of ResNet-50's gradients over 4 processes of this machine: commrt beside DDP over Gloo.

All variants run interleaved in one job; `step_worker` is what a rank does. Read ratios, not milliseconds.
"""

from __future__ import annotations

import multiprocessing
import socket
from math import prod

import pytest
from interleaved import Clock, Times, record, table
from model_gradients import resnet50
from records import append, bus_bandwidth, made
from step_worker import HOST, PEERS, QUANTIZERS, Job, work
from torch.multiprocessing import spawn

CLOCK = Clock()
HOOKED = "ddp bf16 hook"
TORUS = "torus2d bf16"
NBYTES = 4 * 25_557_032


def clock() -> float:
    """Return the time for pytest-benchmark: the one that was measured in the job."""
    return CLOCK.now_s


@pytest.fixture(scope="module")
def times(request: pytest.FixtureRequest) -> Times:
    """Run the job once for this file; return the seconds of every variant and round."""
    shapes = resnet50()
    assert (len(shapes), sum(map(prod, shapes.values()))) == (161, 25_557_032)
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    job = Job(free_port())
    spawn(work, (job, answers), nprocs=job.ranks)
    measured = answers.get()
    bus = bus_bandwidth(NBYTES, job.ranks)

    def figures(variant: str, seconds: float) -> dict[str, float]:
        return {} if variant == "backward alone" else bus(variant, seconds)

    found = made("step", f"{job.ranks} processes", measured, PEERS, figures, nbytes=NBYTES)
    append(request.config.getoption("--records"), found)
    narrow = {name: HOOKED for name in PEERS if "bf16" in name}
    append(
        request.config.getoption("--records"),
        made("step", f"{job.ranks} processes, against DDP's bf16 hook", measured, narrow, figures, nbytes=NBYTES),
    )
    append(
        request.config.getoption("--records"),
        made(
            "step", f"{job.ranks} processes, codes against 16 bits", measured, dict.fromkeys(QUANTIZERS, TORUS), figures
        ),
    )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nResNet-50's gradients, {job.ranks} processes, {job.rounds} rounds\n{table(measured, PEERS)}")
        print(table(measured, {TORUS: TORUS, **dict.fromkeys(QUANTIZERS, TORUS)}))
    return measured


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


@pytest.mark.timeout(600)
@pytest.mark.benchmark(group="step", timer=clock)
@pytest.mark.parametrize("variant", PEERS)
def test_average_the_gradients_of_resnet50(benchmark, times: Times, variant: str):
    benchmark.extra_info.update(record(times, variant, PEERS[variant]))
    benchmark.pedantic(CLOCK.replay(times[variant]), rounds=len(times[variant]))
