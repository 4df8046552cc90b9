# SPDX-License-Identifier: Apache-2.0
"""An optimizer's step that `torch.compile` compiles exchanges as one that it does not."""

from __future__ import annotations

import pytest
from compiled_steps import trained

import commrt
from commrt.testing.processes import run_processes

ALGORITHMS = {"gossip": commrt.Gossip(), "local SGD": commrt.local_sgd.LocalSGD(2, outer=commrt.local_sgd.Nesterov())}


@pytest.mark.slow  # torch imports all of its compiler
@pytest.mark.processes
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_compiled_step_exchanges_as_one_that_is_not(algorithm):
    eager, compiled = (run_processes(2, trained, algorithm, how, limit_s=100) for how in (False, True))
    assert [end.error for end in compiled] == [None, None]
    assert [end.value for end in compiled] == [end.value for end in eager]
