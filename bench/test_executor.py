# SPDX-License-Identifier: Apache-2.0
"""What the runtime itself costs: running a program whose transfers take no time, and preparing one for 1,024 ranks."""

from __future__ import annotations

import pytest
import torch
from null_transport import NullTransport

from commrt.algorithms import ring
from commrt.algorithms.torus import Torus2D
from commrt.collective import all_reduce
from commrt.executor import bind
from commrt.kernels.layout import GRANULE
from commrt.program import Program, program
from commrt.proof import verify
from commrt.transport.protocol import Moment

MOMENT = Moment(0, 0)
RANKS = 1024


def least_buffer(bound_to: Program) -> torch.Tensor:
    """The smallest buffer of which every chunk holds something."""
    return torch.zeros(bound_to.chunks * GRANULE)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.benchmark(group="run")
def test_run_a_ring_of_8_ranks(benchmark):
    mine = program(ring.all_reduce(8), 0)
    bound = bind(mine, least_buffer(mine), NullTransport(0, 8))
    benchmark(bound.run, MOMENT)
    transfers = sum(len(hop.sends) + len(hop.recvs) for hop in mine.hops)
    benchmark.extra_info["transfers"] = transfers
    if benchmark.stats:  # None under --benchmark-disable
        benchmark.extra_info["us_per_transfer"] = 1e6 * benchmark.stats.stats.median / transfers


@pytest.mark.benchmark(group="prepare a torus of 1,024 ranks")
def test_find_one_ranks_program(benchmark):
    schedule = Torus2D().schedule(0, RANKS)
    mine = benchmark.pedantic(program, (schedule, 0), rounds=5, warmup_rounds=1)
    assert len(mine.hops) == 2 * 31 + 2 * 31


@pytest.mark.benchmark(group="prepare a torus of 1,024 ranks")
def test_bind_one_ranks_program(benchmark):
    mine = program(Torus2D().schedule(0, RANKS), 0)
    buffer = least_buffer(mine)
    bound = benchmark.pedantic(bind, (mine, buffer, NullTransport(0, RANKS)), rounds=20, warmup_rounds=1)
    assert bound.nbytes_sent == 2 * (RANKS - 1) * GRANULE * 4


@pytest.mark.benchmark(group="prepare a torus of 1,024 ranks")
def test_verify_the_schedule(benchmark):
    schedule = Torus2D().schedule(0, RANKS)
    proof = benchmark.pedantic(verify, (schedule, all_reduce(RANKS, schedule.chunks)), rounds=3, warmup_rounds=1)
    assert proof.ok
