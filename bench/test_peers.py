# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a GPU exchange through memory that they map: sums, deaths, and times beside NCCL's.

Needs a GPU. Times mean something only where the kernels of several processes can run at the same time, as under MPS.
Deaths are checked without MPS, since a client that is killed leaves the others undefined there.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import peer_ranks
import pytest
from gpu_timer import HAS_GPU
from interleaved import record
from test_ranks import run_processes, values

from commrt.testing.processes import free_port

pytestmark = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

MIB = 1 << 20
SIZES = {2: [64 << 10, MIB, 25 * MIB, 100 * MIB], 4: [MIB, 8 * MIB, 25 * MIB], 8: [MIB, 8 * MIB, 25 * MIB]}
MOST_CTAS = {2: "16", 4: "4", 8: "2"}
"""NCCL's blocks on the GPU that its ranks share: with more than fit at once they would wait for each other."""
UNDER_MPS = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
DEADLINE_S = 5.0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["direct", "ring", "halving_doubling"])
def test_sums_are_right_in_every_round(name, ranks, record_property):
    count = 2000 if UNDER_MPS else 100
    for done, wrong in values(run_processes(ranks, peer_ranks.rounds, name, 10_007, count, 1, limit_s=60.0)):
        record_property("rounds", done)
        assert wrong == ""


def test_many_rounds(record_property):
    count = 100_000 if UNDER_MPS else 500
    for done, wrong in values(run_processes(2, peer_ranks.rounds, "direct", 4096, count, 2, limit_s=100.0)):
        record_property("rounds", done)
        assert wrong == ""


def test_graphs_repeat_what_calls_do(record_property):
    steps = 1000 if UNDER_MPS else 60
    for same, why_not, host_s in values(run_processes(2, peer_ranks.repeat_by_graphs, steps, limit_s=100.0)):
        record_property("host seconds per bucket: 20 %, 50 %, 80 %", [host_s[len(host_s) * i // 10] for i in (2, 5, 8)])
        assert why_not == []
        assert same


@pytest.mark.parametrize("ranks", SIZES)
def test_race(ranks, record_property, monkeypatch):
    monkeypatch.setenv("NCCL_MAX_CTAS", MOST_CTAS[ranks])
    names = ["direct", "torus2d"] if ranks == 2 else ["direct", "halving_doubling"]
    body = partial(peer_ranks.race, nccl=ranks == 2)
    found = values(run_processes(ranks, body, SIZES[ranks], names, 7, 10, limit_s=100.0))[0]
    for nbytes, times in zip(SIZES[ranks], found, strict=True):
        for way in times:
            record_property(f"{ranks} ranks, {nbytes} bytes, {way}", record(times, way, peer_ranks.TORCH))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_kernels_on_peers_memory(ranks, record_property):
    rates = values(run_processes(ranks, peer_ranks.kernels, 16 * MIB, 5, limit_s=60.0))[0]
    for what, found in rates.items():
        record_property(f"{ranks} ranks: {what}, GB/s", sorted(found))


STRIKES = {"killed": signal.SIGKILL, "ended": signal.SIGTERM, "stopped": signal.SIGSTOP}


@pytest.mark.skipif(UNDER_MPS, reason="MPS leaves the others undefined when a client is killed")
@pytest.mark.parametrize("way", ["by calls", "by graph"])
@pytest.mark.parametrize("phase", ["between exchanges", "in a wait"])
@pytest.mark.parametrize("strike", STRIKES)
def test_the_others_learn_who_is_gone_and_go_on(strike, phase, way, record_property, monkeypatch):
    monkeypatch.setenv("SECOND_PORT", str(free_port()))

    def on_message(_rank, _message, process):
        os.kill(process.pid, STRIKES[strike])
        return True

    outcomes = run_processes(
        4, peer_ranks.struck, DEADLINE_S, phase, way, limit_s=90.0, on_message=on_message, holds_store=True
    )
    for outcome in outcomes[:-1]:
        assert outcome.error is None
        assert outcome.value is not None
        record_property(f"rank {outcome.rank}", outcome.value)
        assert "DeadlineExceeded" in outcome.value["error"] or "PeerLost" in outcome.value["error"]
        assert "rank 3" in outcome.value["error"]
        assert outcome.value["seconds"] < DEADLINE_S + 5.0
        assert outcome.value["sum without it"]
