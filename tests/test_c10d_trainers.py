# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under what others wrote: trainers, hooks, compilers, checkpoints. Gloo's losses."""

from __future__ import annotations

import c10d_checkpoints
import c10d_optimized
import c10d_ranks
import c10d_trainers
import pytest
from rank_pool import Pool

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


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request):
    return request.param


@pytest.fixture
def pool(ranks):
    """New ones for each test: torch keeps plans of checkpoints as long as a process lives."""
    with Pool(ranks) as pool:
        yield pool


def like(losses, ranks):
    """What is as good as `losses`: two summands have but one order."""
    return losses if ranks == 2 else pytest.approx(losses, abs=ROUNDING)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.__name__)
def test_a_trainer_has_the_losses_that_it_has_over_gloo(trainer):
    with Pool(4) as pool:  # each process imports the trainer once
        for ranks in (2, 4):
            for losses in pool.values(c10d_trainers.trained, trainer, size=ranks, limit_s=LIMIT_S):
                assert losses["commrt"] == like(losses["gloo"], ranks), ranks
                assert losses["gloo"][-1] < 0.9 * c10d_trainers.loss_of(c10d_trainers.network()), ranks


@pytest.mark.parametrize("ways", KINDS.values(), ids=KINDS)
def test_what_torch_makes_of_a_model_has_the_losses_that_it_has_over_gloo(pool, ranks, ways):
    gloo, ours = (c10d_ranks.answers(pool, *ways, backend=backend, size=ranks) for backend in ("gloo", "commrt"))
    for way, by_rank in gloo.items():
        assert ours[way] == [like(losses, ranks) for losses in by_rank], way
        assert by_rank[0][-1] < 0.9 * by_rank[0][0]


def test_a_compiled_ddp_has_the_losses_of_a_plain_one_over_gloo(pool, ranks):
    plain = c10d_ranks.answers(pool, c10d_optimized.uncompiled, backend="gloo", size=ranks)["uncompiled"]
    ways = c10d_optimized.COMPILED[: None if ranks == 2 else 1]  # what a compiler does, it does on each rank
    for way, by_rank in c10d_ranks.answers(pool, *ways, size=ranks).items():
        assert by_rank == [pytest.approx(losses, abs=ROUNDING) for losses in plain], way
