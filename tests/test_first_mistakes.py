# SPDX-License-Identifier: Apache-2.0
"""What people do wrong first: each error says in which call and step both ranks were, and what to do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import for_each
from small_models import backward, trainee
from torch import nn
from transports import shared

import commrt
from commrt.errors import CommrtError
from commrt.testing.ranks import local_worlds

RING = commrt.algorithms.ring.all_reduce(2)
CALLS = {
    "world.all_reduce()": lambda world, *_: world.all_reduce(torch.ones(1)),
    "world.run()": lambda world, *_: world.run(RING, torch.ones(4)),
    "consolidate()": lambda _world, replica, *_: replica.consolidate(),
    "disagreement()": lambda _world, replica, *_: replica.disagreement(),
    "load_state_dict()": lambda _world, replica, *_: replica.load_state_dict(replica.state_dict()),
    "attach()": lambda world, *_: trainee(world),
    "join()": lambda _world, replica, *_: replica.join().__enter__(),
}


def train(world, mistake):
    """Four steps, of which rank 0 makes a `mistake` after two."""
    with world:
        model, optimizer, replica = trainee(world, nn.BatchNorm1d(8), bucket_cap_mb=1e-4)
        for step in range(4):
            if step == 2 and world.rank == 0:
                mistake(world, replica, model, optimizer)
            optimizer.zero_grad()
            backward(model, world.rank)
            optimizer.step()


def errors(mistake):
    def one(world):
        with pytest.raises(CommrtError) as caught:
            train(world, mistake)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(one, local_worlds(2, connect=lambda _, ranks, limit_s: shared(ranks, limit_s)))]


@for_each("call", CALLS)
def test_a_call_that_only_rank_0_makes_is_named_on_both_ranks_with_their_steps(call):
    for error in errors(CALLS[call]):
        where, _, advice = error.partition(": ")
        assert advice.startswith(f"call {call} on every rank, not under `if rank == 0:`; if a rank ran out of data")
        assert call in where
        assert "backward() of step 2" in where


STEPS = "steps of optimizers (those of the n-th count n-fold)"


@for_each(
    ("mistake", "here", "elsewhere"),
    [
        (lambda *loop: backward(loop[2], 0), f"2 {STEPS}", f"3 {STEPS}: the ranks ran different numbers of backward"),
        (lambda *loop: loop[3].step(), "none", "a backward pass"),
    ],
)
def test_other_numbers_of_passes_or_steps_say_what_each_rank_had(mistake, here, elsewhere):
    assert errors(mistake)[0].split(": here ")[1].startswith(f"{here}, elsewhere {elsewhere}")
