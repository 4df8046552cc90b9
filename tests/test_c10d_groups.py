# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed in several groups, its works and their callbacks, and messages of two ranks."""

from __future__ import annotations

import c10d_callbacks
import c10d_groups
import c10d_ranks
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

BODIES = [*c10d_callbacks.BODIES, *c10d_groups.BODIES]


@pytest.fixture(scope="module")
def found():
    with Pool(4) as pool:
        return c10d_ranks.answers(pool, *BODIES)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_each_of_4_ranks(found, body):
    for got, expected in found[body.__name__]:
        assert got == expected
