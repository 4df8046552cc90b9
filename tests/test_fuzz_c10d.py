# SPDX-License-Identifier: Apache-2.0
"""Drawn sequences of torch.distributed's calls end over commrt as they end over Gloo."""

import drawn_calls
import pytest
from fuzzing import MORE
from rank_pool import Pool


@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_sequences_of_calls_leave_what_they_leave_over_gloo():
    with Pool(3) as pool:
        for part in range(MORE):
            found = pool.values(drawn_calls.compare, part * 10, 10, limit_s=100.0)
            assert found == [[]] * 3
