# SPDX-License-Identifier: Apache-2.0
"""Collectives in callbacks of futures over the backend of torch.distributed, and DDP's own hooks beside Gloo."""

from __future__ import annotations

import c10d_callbacks
import c10d_ranks
import pytest
import torch
from rank_pool import Pool

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool():
    with Pool(3) as pool:
        yield pool


def total(size, added=0.0):
    """The sum of what all ranks have."""
    return torch.arange(4.0) * size + sum(range(size)) + added * size


EXPECTED = [
    (c10d_callbacks.waits_for_a_work, lambda size, _: [size * total(size)] * 2),
    (c10d_callbacks.waits_for_a_future, lambda size, _: size * total(size)),
    (c10d_callbacks.makes_other_collectives, lambda size, _: [total(size) + rank for rank in range(size)]),
    (c10d_callbacks.sends_and_receives, lambda size, rank: total(size) + (rank - 1) % size),
    (c10d_callbacks.uses_another_group, lambda size, _: size * total(size)),
    (c10d_callbacks.nests_deeper, lambda size, _: size * size * total(size)),
    (c10d_callbacks.takes_turns, lambda size, _: [size * total(size, n) for n in range(10)]),
]
"""What each rank has in the end."""


@pytest.mark.parametrize("size", [2, 3])
def test_a_callback_makes_collectives(pool, size):
    found = c10d_ranks.answers(pool, *(body for body, _ in EXPECTED), size=size)
    for body, expected in EXPECTED:
        wanted = [expected(size, rank) for rank in range(size)]
        assert found[body.__name__] == [
            [one.tolist() for one in each] if isinstance(each, list) else each.tolist() for each in wanted
        ], body.__name__


def test_a_hook_of_ddp_gives_the_losses_of_gloo(pool):
    ours, theirs = (c10d_ranks.answers(pool, *c10d_callbacks.HOOKS, backend=backend) for backend in ("commrt", "gloo"))
    for hook, losses in theirs.items():
        got, expected = torch.tensor(ours[hook]), torch.tensor(losses)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text, hook=hook: f"{hook}: {text}")
