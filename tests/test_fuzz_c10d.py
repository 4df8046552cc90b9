# SPDX-License-Identifier: Apache-2.0
"""Drawn sequences of torch.distributed's calls end over commrt as they end over Gloo."""

import drawn_calls
import pytest
from fuzzing import MORE
from rank_pool import Pool


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("find", "count"),
    [(drawn_calls.differences, 10), pytest.param(drawn_calls.compiled_differences, 5, marks=pytest.mark.slow)],
    ids=["called", "compiled"],
)
def test_sequences_of_calls_leave_what_they_leave_over_gloo(find, count):
    with Pool(3) as pool:
        for part in range(MORE):
            found = pool.values(drawn_calls.compare, find, part * count, count, limit_s=200.0)
            assert found == [[]] * 3
