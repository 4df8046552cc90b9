# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed on 4 ranks: groups, works, messages, DTensors; DDP, FSDP2 and HSDP train with it."""

from __future__ import annotations

import c10d_groups
import c10d_ranks
import c10d_training
import pytest
from rank_pool import Pool

pytestmark = pytest.mark.processes

BODIES = [*c10d_training.TENSORS, *c10d_groups.BODIES]


@pytest.fixture(scope="module")
def found():
    with Pool(4) as pool:
        over_gloo = c10d_ranks.answers(pool, c10d_training.hooked, backend="gloo")
        return over_gloo | c10d_ranks.answers(pool, *c10d_training.TRAINED, *BODIES)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_each_of_4_ranks(found, body):
    for got, expected in found[body.__name__]:
        assert got == expected


@pytest.mark.parametrize("way", [*c10d_training.TRAINED, c10d_training.hooked], ids=lambda way: way.__name__)
def test_a_model_ends_with_the_parameters_of_one_process_on_whole_batches(found, way):
    assert max(found[way.__name__]) < 1e-6
