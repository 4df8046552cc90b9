# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed under what others wrote: trainers, hooks, checkpoints, compilers. Gloo's losses."""

import c10d_losses
import c10d_trainers
import pytest
import torch.distributed as dist
from inductor import what_inductor_lacks
from rank_pool import Pool

LIMIT_S = 200.0
"""Some trainers take ten seconds to be imported, by each process."""
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]

TRAINERS = [c10d_trainers.accelerate, c10d_trainers.lightning, c10d_trainers.transformers, c10d_trainers.torchft]
LIGHT = [c10d_trainers.accelerate, c10d_trainers.torchft]
"""What takes no seconds to import; only these are tried on 4 ranks, too."""
ROUNDING = 1e-6
"""Of losses around 1, where four summands are added in another order."""


def like(losses, ranks):
    """What is as good as `losses`: two summands have but one order."""
    return losses if ranks == 2 else pytest.approx(losses, abs=ROUNDING)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda one: one.__name__)
def test_a_trainer_has_the_losses_that_it_has_over_gloo(trainer):
    if trainer is c10d_trainers.torchft and hasattr(dist, "_reconfigure"):
        pytest.skip("the group of the page is one of torch 2.13 or earlier")
    with Pool(4 if trainer in LIGHT else 2) as pool:  # each process imports the trainer once
        for ranks in (2, 4)[: pool.size // 2]:
            for losses in pool.values(c10d_trainers.trained, trainer, size=ranks, limit_s=LIMIT_S):
                assert losses["commrt"] == like(losses["gloo"], ranks), ranks
                assert losses["gloo"][-1] < 0.9 * c10d_trainers.loss_of(c10d_trainers.network()), ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_hooks_shards_and_checkpoints_of_torch_have_the_losses_that_they_have_over_gloo(ranks):
    ways = [*c10d_losses.ON_ANY, *(c10d_losses.ON_TWO if ranks == 2 else [])]
    with Pool(ranks) as pool:
        gloo, ours = (pool.answers(*ways, backend=backend) for backend in ("gloo", "commrt"))
    for way, by_rank in gloo.items():
        assert ours[way] == [like(losses, ranks) for losses in by_rank], way
        assert by_rank[0][-1] < 0.9 * by_rank[0][0], way


@pytest.mark.parametrize("compiler", c10d_losses.COMPILED)
def test_what_is_compiled_gives_the_same_as_over_gloo(compiler, monkeypatch):
    if compiler == "inductor" and (lacking := what_inductor_lacks()):
        pytest.skip(f"inductor needs {lacking}, which is not here")
    monkeypatch.setenv("COMPILER", compiler)
    ways = c10d_losses.COMPILED[compiler]
    with Pool(2) as pool:  # commrt first: what has been compiled for one group may serve the next one, too
        ours, gloo = (pool.answers(*ways, backend=backend) for backend in ("commrt", "gloo"))
    for way, by_rank in gloo.items():
        assert isinstance(by_rank[0], list)  # else an error
        assert ours[way] == [pytest.approx(values, abs=ROUNDING) for values in by_rank], way
