# SPDX-License-Identifier: Apache-2.0
"""planner_check.py: its table for curves whose steps are known."""

from __future__ import annotations

import pytest
from cases import for_each
from convergence import Steps
from curve import GOSSIP
from made_curves import curves_of, steps_of, written
from planner_check import CASES, Row, check, main, order

from commrt.errors import UsageError


def half(ranks):
    return 4 + 30 / ranks


def row(method, recorded, low, high):
    return Row(0.2, method, 8, 16, recorded, Steps((low + high) / 2, low, high, is_recorded=False), "", {})


def test_each_case_has_a_row_with_what_was_recorded_and_predicted():
    curves = curves_of(half, (1, 2, 4, 8, 16), seeds=2)
    rows = list(check(curves, 0.2))
    assert [(each.fitted, each.ranks) for each in rows] == [*CASES]
    for each in rows:
        assert each.recorded == pytest.approx(steps_of(half(each.ranks), 0.2), rel=0.06)
        assert abs(each.error) < 0.1


def test_the_command_prints_each_target_and_the_order(monkeypatch, tmp_path, capsys):
    written(tmp_path, curves_of(half, (1, 2, 4, 8, 16), seeds=2))
    written(tmp_path, curves_of(lambda ranks: 3 * half(ranks), (1, 2, 4, 8, 16), seeds=2, training=GOSSIP))
    monkeypatch.setattr("sys.argv", ["planner_check.py", str(tmp_path), "--targets", "0.2"])
    main()
    printed = capsys.readouterr().out
    assert printed.count("| 0.2 | synchronous |") == len(CASES)
    assert "loss 0.2: right: synchronous" in printed


def test_a_folder_without_curves_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["planner_check.py", str(tmp_path)])
    with pytest.raises(UsageError, match="holds no"):
        main()


@for_each(
    ("second", "said"),
    [
        ((20, 18, 22), "right: a 10 < b 20"),
        ((20, 10, 22), "right but intervals overlap: a 10 < b 20"),
        ((20, 5, 12), "WRONG but intervals overlap: a 10 < b 20"),
        ((20, 5, 7), "WRONG: a 10 < b 20"),
    ],
)
def test_an_order_is_right_or_wrong_and_says_if_intervals_overlap(second, said):
    assert order([row("a", 10, 9, 11), row("b", *second)]) == said
