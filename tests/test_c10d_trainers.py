# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under what others wrote: trainers, hooks, compilers, checkpoints. Gloo's losses."""

from __future__ import annotations

import c10d_checkpoints
import c10d_optimized
import c10d_ranks
import c10d_trainers
import pytest

from commrt.testing.processes import run_processes

LIMIT_S = 200.0
"""Some trainers take ten seconds to be imported, by each process."""
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]

TRAINERS = [c10d_trainers.accelerate, c10d_trainers.lightning, c10d_trainers.transformers, c10d_trainers.torchft]
KINDS = {
    "PowerSGD and ZeRO": [*c10d_optimized.POWER_SGD, c10d_optimized.zero_redundancy],
    "checkpoints": c10d_checkpoints.DCP,
    "FSDP1": c10d_checkpoints.FSDP1,
}
ROUNDING = 1e-6
"""Of losses around 1, where four summands are added in another order."""

on_2_and_4_ranks = pytest.mark.parametrize("ranks", [2, 4])


def like(losses, ranks):
    """What is as good as `losses`: two summands have but one order."""
    return losses if ranks == 2 else pytest.approx(losses, abs=ROUNDING)


@on_2_and_4_ranks
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.__name__)
def test_a_trainer_has_the_losses_that_it_has_over_gloo(trainer, ranks):
    for outcome in run_processes(ranks, c10d_trainers.trained, trainer, limit_s=LIMIT_S, holds_store=True):
        assert outcome.error is None
        gloo, ours = outcome.value["gloo"], outcome.value["commrt"]
        assert ours == like(gloo, ranks)
        assert gloo[-1] < 0.9 * c10d_trainers.loss_of(c10d_trainers.network())


@on_2_and_4_ranks
@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_makes_of_a_model_has_the_losses_that_it_has_over_gloo(kind, ranks):
    gloo, ours = (c10d_ranks.answers(ranks, *KINDS[kind], backend=backend) for backend in ("gloo", "commrt"))
    for way, by_rank in gloo.items():
        assert ours[way] == [like(losses, ranks) for losses in by_rank], way
        assert by_rank[0][-1] < 0.9 * by_rank[0][0]


@on_2_and_4_ranks
def test_a_compiled_ddp_has_the_losses_of_a_plain_one_over_gloo(ranks):
    plain = c10d_ranks.answers(ranks, c10d_optimized.uncompiled, backend="gloo")["uncompiled"]
    for way, by_rank in c10d_ranks.answers(ranks, *c10d_optimized.COMPILED).items():
        assert by_rank == [pytest.approx(losses, abs=ROUNDING) for losses in plain], way
