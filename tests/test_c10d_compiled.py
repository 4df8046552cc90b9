# SPDX-License-Identifier: Apache-2.0
"""Compiled models and functions over the backend of torch.distributed, beside Gloo."""

from __future__ import annotations

import c10d_compiled
import c10d_ranks
import pytest
import torch
from rank_pool import Pool

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ALL = {"aot_eager": c10d_compiled.INTEGRATIONS, "inductor": [c10d_compiled.ddp, c10d_compiled.all_reduce]}


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


@pytest.mark.parametrize("compiler", ALL)
def test_what_is_compiled_gives_the_same_as_over_gloo(pool, compiler, monkeypatch):
    monkeypatch.setenv("COMPILER", compiler)
    # Commrt first: what has been compiled for one group may serve the next one, too.
    ours, theirs = (c10d_ranks.answers(pool, *ALL[compiler], backend=backend) for backend in ("commrt", "gloo"))
    for name, by_rank in theirs.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(by_rank), msg=name)
