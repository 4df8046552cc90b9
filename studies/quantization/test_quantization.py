# SPDX-License-Identifier: Apache-2.0
"""What compare_wires.py measures with: its network, its replay of sums, and its search for a target."""

from __future__ import annotations

import compare_wires
import pytest
import quantized_sums
import quantized_training
import torch
from small_cnn import STEPS, network, require_equal

import commrt
from commrt.testing.ranks import run_ranks

CASES = {"two ranks": (2, commrt.Direct()), "hosts": (4, commrt.Direct(within=2))}


def test_the_network_has_8826_parameters():
    assert sum(param.numel() for param in network(0).parameters()) == 8826


def test_a_replayed_direct_sum_of_integers_that_bytes_hold_is_exact():
    values = torch.arange(4 * 2048).remainder(255).sub(127.0).view(4, 2048)
    values[:, ::256] = 127  # so that the scale of each block is a power of two
    each = torch.stack([values, values, 2 * values, 4 * values])
    found = quantized_sums.replayed(commrt.Direct().schedule(0, 4), each, commrt.Int8())
    assert torch.equal(found, (8 * values).expand(4, -1, -1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wire", [commrt.Int8(), commrt.Int4(feedback=False)], ids=str)
def test_a_replay_equals_the_runtime_bit_by_bit(case, wire):
    ranks, algorithm = CASES[case]
    values = torch.randn(ranks, ranks, 2048, generator=torch.Generator().manual_seed(0))

    def body(world):
        total = values[world.rank].clone()
        world.all_reduce(total, "sum", algorithm=algorithm, wire=wire)
        return total

    replayed = quantized_sums.replayed(algorithm.schedule(0, ranks), values, wire)
    assert torch.equal(replayed, torch.stack(run_ranks(ranks, body)))


def test_two_steps_on_two_ranks_leave_equal_replicas_and_can_be_repeated():
    def wire(seed, _):
        return commrt.Int4(rounding="stochastic", feedback=False, seed=seed)

    first, again, other = (quantized_training.trained(wire, seed, steps=2, ranks=2) for seed in (0, 0, 1))
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)


def test_a_replica_that_differs_is_found():
    models = [network(0), network(0)]
    require_equal(models)
    with torch.no_grad():
        models[1][0].bias[0] += 1e-6
    with pytest.raises(RuntimeError, match="rank 1 differs"):
        require_equal(models)


def test_the_target_is_found_from_recorded_norms():
    norms = {step: 1.0 + step % 7 for step in range(1, STEPS)}
    target = compare_wires.target_for(3.5, norms)
    assert compare_wires.mean_bits(target, norms) == pytest.approx(3.5, abs=0.02)
