# SPDX-License-Identifier: Apache-2.0
"""slow_workers.py: its prediction, and a short run of its workers."""

from __future__ import annotations

import pytest
import slow_workers
from cases import for_each


@for_each("needed", [8, 7, 6])
def test_without_slow_steps_a_step_takes_the_base_time(monkeypatch, needed):
    monkeypatch.setattr(slow_workers, "PROB", 0.0)
    assert slow_workers.predicted(needed, 0, 20, base_s=0.5) == pytest.approx(0.5)


def test_each_backup_is_predicted_to_save_time():
    seconds = [slow_workers.predicted(needed, 0, 200, base_s=0.08) for needed in (8, 7, 6)]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_has_the_time_of_each_update_and_the_weights_of_each_tenth():
    found = slow_workers.trained(7, 0, 20, base_s=0.01, prob=0.0)
    assert [*sorted(found)] == [*range(21)]
    assert [step for step, (_, weights) in sorted(found.items()) if weights] == [10, 20]
    assert found[20][0] > found[10][0] > 0
