# SPDX-License-Identifier: Apache-2.0
"""Training with any algorithm is training with DDP, and training on one joined batch; in real processes."""

from __future__ import annotations

import equivalence
import pytest

from commrt.testing.processes import run_processes

TO_DDP = 1e-6
TO_JOINED = 1e-5
LOSSY = {"fp32": 0.0, "bf16": 0.01, "fp16": 0.002}
"""How far a rounded wire may lead away after 20 steps; the replicas stay equal all the same."""


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8])
def test_training_equals_ddp_and_the_joined_batch(size):
    outcomes = run_processes(size, equivalence.compare_everything, limit_s=280)
    assert [outcome.error for outcome in outcomes] == [None] * size
    assert outcomes[0].value
    for outcome in outcomes:
        for scenario, algorithm, wire, to_ddp, to_joined, equal in outcome.value:
            what = f"{scenario}, {algorithm}, {wire} wire, rank {outcome.rank}: {to_ddp:.1e}, {to_joined:.1e}"
            assert equal, what
            assert to_ddp <= TO_DDP + LOSSY[wire], what
            assert to_joined <= TO_JOINED + LOSSY[wire], what
