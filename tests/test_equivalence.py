# SPDX-License-Identifier: Apache-2.0
"""Training with any algorithm is training with DDP, and training on one joined batch; in real processes."""

import sys

import pytest
from equivalence import INDUCTOR, SCENARIOS, compare
from inductor import what_inductor_lacks

from commrt.testing.processes import run_processes

TO_DDP = 1e-6
TO_JOINED = 1e-5
LOSSY = {"fp32": 0.0, "bf16": 0.01, "fp16": 0.002}
"""How far a rounded wire may lead away after 20 steps; the replicas stay equal all the same."""


@pytest.fixture(scope="module")
def farthest():
    """The largest distances to DDP and to the joined batch by scenario and wire; `pytest -s` shows them at the end."""
    found = {}
    yield found
    for (scenario, wire), (to_ddp, to_joined) in found.items():
        sys.stdout.write(f"\n{scenario}, {wire} wire: to DDP {to_ddp:.1e}, to the joined batch {to_joined:.1e}")


def judge(outcomes, farthest):
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert outcomes[0].value
    for outcome in outcomes:
        for scenario, algorithm, wire, to_ddp, to_joined, equal in outcome.value:
            what = f"{scenario}, {algorithm}, {wire} wire, rank {outcome.rank}: {to_ddp:.1e}, {to_joined:.1e}"
            assert equal, what
            assert to_ddp <= TO_DDP + LOSSY[wire], what
            assert to_joined <= TO_JOINED + LOSSY[wire], what
            so_far = farthest.get((scenario, wire), (0.0, 0.0))
            farthest[scenario, wire] = max(so_far[0], to_ddp), max(so_far[1], to_joined)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_training_equals_ddp_and_the_joined_batch(size, farthest):
    """At a rank count of each kind; `make prove` proves the schedules of all, and training knows of no count."""
    judge(run_processes(size, compare, SCENARIOS, limit_s=280), farthest)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_model_compiled_by_inductor_trains_as_ddp_trains_it_uncompiled(farthest, tmp_path, monkeypatch):
    if lacking := what_inductor_lacks():
        pytest.skip(f"inductor needs {lacking}, which is not here")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    judge(run_processes(2, compare, [INDUCTOR], [("torus2d", "fp32", "own")], limit_s=280), farthest)
