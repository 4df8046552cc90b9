# SPDX-License-Identifier: Apache-2.0
"""Collectives in callbacks of futures over the backend of torch.distributed, and DDP's own hooks beside Gloo."""

from __future__ import annotations

import c10d_callbacks
import c10d_ranks
import pytest
import torch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=[2, 3])
def size(request):
    return request.param


@pytest.fixture(scope="module")
def found(size):
    return c10d_ranks.answers(size, *c10d_callbacks.BY_HAND)


@pytest.fixture(scope="module")
def losses(size):
    return {backend: c10d_ranks.answers(size, *c10d_callbacks.HOOKS, backend=backend) for backend in ("commrt", "gloo")}


def total(size, added=0.0):
    """The sum of what all ranks have."""
    return torch.arange(4.0) * size + sum(range(size)) + added * size


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (c10d_callbacks.waits_for_a_work, lambda size, _: [size * total(size)] * 2),
        (c10d_callbacks.waits_for_a_future, lambda size, _: size * total(size)),
        (c10d_callbacks.makes_other_collectives, lambda size, _: [total(size) + rank for rank in range(size)]),
        (c10d_callbacks.sends_and_receives, lambda size, rank: total(size) + (rank - 1) % size),
        (c10d_callbacks.uses_another_group, lambda size, _: size * total(size)),
        (c10d_callbacks.nests_deeper, lambda size, _: size * size * total(size)),
        (c10d_callbacks.takes_turns, lambda size, _: [size * total(size, n) for n in range(10)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_callback_makes_collectives(found, size, body, expected):
    for rank, got in enumerate(found[body.__name__]):
        wanted = expected(size, rank)
        assert got == ([one.tolist() for one in wanted] if isinstance(wanted, list) else wanted.tolist())


@pytest.mark.parametrize("hook", c10d_callbacks.HOOKS, ids=lambda hook: hook.__name__)
def test_a_hook_of_ddp_gives_the_losses_of_gloo(losses, hook):
    ours, theirs = losses["commrt"][hook.__name__], losses["gloo"][hook.__name__]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
