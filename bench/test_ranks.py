# SPDX-License-Identifier: Apache-2.0
"""Check several ranks on this machine's GPUs, or its only one: the bits of the CPU, training, and failures.

Without a GPU the ranks run on the CPU, which shows that this file runs.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import gpu_ranks
import pytest
import torch
from gpu_timer import HAS_GPU
from records import made

from commrt.algorithms.catalogue import ALGORITHMS
from commrt.testing.processes import Outcome
from commrt.testing.processes import run_processes as started

SIZES = [2, 4, 8] if HAS_GPU else [2]
IDS = [f"ranks{size}" for size in SIZES]
LIMIT_S = 120.0
FIRST_LIMIT_S = 60.0
F32, BF16 = torch.float32, torch.bfloat16
MIB_NUMEL = (1 << 20) // 4


run_processes = partial(started, start="spawn")  # each process initializes CUDA itself


def values(outcomes: list[Outcome]) -> list:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.value is not None for outcome in outcomes), "a rank hung"
    return [outcome.value for outcome in outcomes]


def test_two_ranks_exchange_a_mebibyte(record_property):
    """Run first, with a deadline: only this test shows whether ranks can share this machine's GPU."""
    seconds = values(run_processes(2, gpu_ranks.swap, MIB_NUMEL, limit_s=FIRST_LIMIT_S))[0]
    record_property("seconds per exchange of 1 MiB", sorted(seconds))


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_every_algorithm_gives_the_bits_of_the_cpu(size):
    cases = [(name, numel, dtype) for name in ALGORITHMS for numel in (1, 1009, 262_144) for dtype in (F32, BF16)]
    for answers in values(run_processes(size, gpu_ranks.reduce, cases, limit_s=LIMIT_S)):
        different = [case for case, same in zip(cases, answers, strict=True) if not same]
        assert [case for case in different if case[2] == F32] == []
        assert different == []


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_mixing_with_changing_partners_gives_the_bits_of_the_cpu(size):
    rounds = size.bit_length() - 1
    assert values(run_processes(size, gpu_ranks.mix, 100_003, rounds, limit_s=LIMIT_S)) == [True] * size


@pytest.mark.parametrize("size", SIZES, ids=IDS)
@pytest.mark.parametrize("algorithm", ["ring", "torus2d"])
def test_training_ends_where_the_cpu_ends(algorithm, size, record_property):
    steps = 50 if HAS_GPU else 5
    for distance, equal in values(run_processes(size, gpu_ranks.train, algorithm, steps, limit_s=LIMIT_S)):
        record_property(f"largest relative distance after {steps} steps", distance)
        assert equal
        assert distance < 1e-3


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_graphs_end_where_calls_end_and_slices_where_the_cpu_does(size, record_property):
    steps = min(20, 80 // size) if HAS_GPU else 1 + gpu_ranks.LACKING
    for run in values(run_processes(size, gpu_ranks.train_by_graphs, steps, limit_s=LIMIT_S)):
        record_property("launches per bucket by calls, counted", run.launches)
        record_property("host seconds per bucket by calls, percentiles 20, 50, 80", run.calls_s)
        record_property("host seconds per bucket by graph, percentiles 20, 50, 80", run.graphs_s)
        record_property("distance of slices from the CPU", run.sliced_distance)
        assert run.same
        assert run.sliced_distance < 1e-3
        assert not (HAS_GPU and run.why_not)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_survivors_of_a_killed_rank_end_by_the_deadline(size, record_property):
    timeout_s = 5.0

    def strike(*told):
        told[-1].kill()

    *survivors, _ = run_processes(size, gpu_ranks.struck, timeout_s, limit_s=LIMIT_S, on_message=strike)
    for seconds, said in values(survivors):
        assert seconds < 2 * timeout_s + 10
        record_property(f"survivors of {size} ranks", f"{seconds:.2f} s: {said}")


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
def test_a_step_allocates_nothing_and_the_host_does_not_wait(graphs, record_property):
    for plain, attached, why_not in values(run_processes(2, gpu_ranks.thrift, graphs, limit_s=LIMIT_S)):
        assert attached == plain
        assert not (HAS_GPU and why_not)
        record_property("tensors that a backward pass makes", attached)


def test_the_memory_that_two_ranks_use_is_their_own():
    """For compute-sanitizer: calls, then graphs."""
    for why_not in values(run_processes(2, gpu_ranks.sound, limit_s=LIMIT_S)):
        assert not (HAS_GPU and why_not)


def test_a_world_works_beside_torch_s_own_group():
    answers = values(run_processes(2, gpu_ranks.beside_torch, 20, limit_s=LIMIT_S))
    assert answers == [(1.5, 1.5)] * 2


@pytest.mark.parametrize("size", SIZES, ids=IDS)
@pytest.mark.parametrize("mib", [1, 25] if HAS_GPU else [1])
def test_all_reduces_beside_torch_s(mib, size, record_property):
    each = values(run_processes(size, gpu_ranks.race, mib * MIB_NUMEL, 20 if HAS_GPU else 2, limit_s=LIMIT_S))
    times = {name: [max(turn) for turn in zip(*(one[name] for one in each), strict=True)] for name in each[0]}
    for one in made("ranks", f"{size} ranks, {mib} MiB", times, dict.fromkeys(times, gpu_ranks.TORCH)):
        record_property(one["variant"], {key: one[key] for key in ("median_s", "ratio", "ratio_quantile80")})


def test_a_world_that_was_given_up_is_followed_by_another():
    assert values(run_processes(2, gpu_ranks.fail_and_begin_again, limit_s=LIMIT_S)) == [[3.0, 3.0]] * 2


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_nothing_waits_at_exit_though_nothing_was_closed():
    """Check an exit without close: CuPy frees a communicator when it is collected, which would wait for others."""
    code = (
        "import torch; from torch.distributed import HashStore; from commrt.transport.nccl import NcclTransport\n"
        "transport = NcclTransport(HashStore(), 0, range(1))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
