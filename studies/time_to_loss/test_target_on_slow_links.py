# SPDX-License-Identifier: Apache-2.0
"""target_on_slow_links.py: what needs no network; the rest needs root."""

from __future__ import annotations

import pytest
import target_on_slow_links as lab

from commrt import Gossip
from commrt.algorithms.registration import Nodes
from commrt.local_sgd import LocalSGD
from commrt.tools.planning.planner import tried_shapes
from commrt.tools.planning.python_calls import short_name


def test_each_planned_all_reduce_is_found_by_its_name():
    for algorithm, _ in tried_shapes(Nodes(lab.RANKS, lab.PER_HOST)):
        assert lab._algorithm("synchronous", short_name(algorithm)) == algorithm
        assert lab._algorithm("local", short_name(algorithm)) == LocalSGD(8, inner=algorithm)


def test_gossip_needs_no_all_reduce():
    assert lab._algorithm("gossip", "") == Gossip()


def test_a_row_compares_what_was_predicted_with_the_mean_of_all_seeds():
    plan = {"steps": 80.0, "step_seconds": 0.09, "seconds": 7.2, "algorithm": "Ring()"}
    row = lab._row("synchronous", plan, [(80, 8.0), (100, 10.0)])
    assert "predicted 80 steps of 90.0 ms = 7.2 s; measured 90 steps of 100.0 ms = 9.0 s (8.0, 10.0)" in row
    assert row.endswith("predicted / measured 0.80")


def test_nothing_is_measured_without_a_lab(monkeypatch):
    monkeypatch.setattr(lab, "missing", lambda: "no lab")
    monkeypatch.setattr(lab.sys, "argv", ["target_on_slow_links.py", "curves"])
    with pytest.raises(SystemExit, match="nothing was measured: no lab"):
        lab.main()
