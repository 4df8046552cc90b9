# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under Accelerate and Lightning, beside Gloo."""

from __future__ import annotations

import c10d_trainers
import pytest

from commrt.testing.processes import run_processes


@pytest.mark.processes
@pytest.mark.parametrize("trainer", [c10d_trainers.accelerate, c10d_trainers.lightning], ids=lambda one: one.__name__)
def test_a_trainer_ends_with_the_same_weights_as_on_gloo(trainer):
    for outcome in run_processes(2, c10d_trainers.compare, trainer, holds_store=True):
        assert outcome.error is None
        used, distance, moved = outcome.value
        assert used == ["gloo", "commrt"]
        assert distance <= 1e-6
        assert moved > 0.1


@pytest.mark.processes
def test_lightning_logs_the_same_means_of_all_ranks_as_on_gloo():
    for outcome in run_processes(2, c10d_trainers.logs, holds_store=True):
        assert outcome.error is None
        gloo, commrt = outcome.value
        assert gloo["images"] == 64.0
        assert commrt == pytest.approx(gloo, rel=1e-6)
