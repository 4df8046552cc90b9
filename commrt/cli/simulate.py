# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate backup``: what it saves to wait for some of the ranks only. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict

from commrt.cli.backups import Answer, Question, answer, known, show, span
from commrt.cli.outputs import json_of
from commrt.pricing.splits import PerRank

__all__ = ["run"]


def run(question: Question, as_json: bool) -> None:
    """Simulate steps that wait for some of the ranks, print the outcome; raises `UsageError`."""
    found = answer(question)
    if as_json:
        print(json_of(_record(found)))
        return
    show(found, found.rows(_landmarks(found.ranks)), found.choice.best)
    print(_sentence(found))


def _landmarks(ranks: int) -> set[int]:
    """Far from where ranks straggle."""
    return {1, *(max(1, ranks * percent // 100) for percent in (50, 80, 90))}


def _record(found: Answer) -> dict[str, object]:
    choice, rows = found.choice, found.rows(_landmarks(found.ranks))
    return {
        "best_quorum": choice.best,
        "backups": found.backups,
        "likely_quorums": choice.likely,
        "best_quorum_if_late_finish": found.best_if_late_finish,
        "kth_time_s": known(choice.kth_s),
        "expected_kth_time_s": _unless_unknown(found.expected_kth_s),
        "hours": _unless_unknown(found.hours),
        "relative_time": known(found.relative_time),
        "lower_bound_hours": choice.bound_s / 3600 if found.goal.in_updates else None,
        "lower_bound_relative_time": choice.bound_s / choice.goal_s[-1],
        "table": [asdict(row) for row in rows],
    } | found.record()


def _unless_unknown(column: PerRank) -> list[float | None] | None:
    cells = known(column)
    return None if cells.count(None) == len(cells) else cells


def _sentence(found: Answer) -> str:
    choice = found.choice
    bound = choice.bound_s / choice.goal_s[choice.best - 1]
    return (
        f"best: wait for {choice.best} of {found.ranks} ranks ({span(*choice.likely)}), which leaves {found.backups} "
        f"backups; a quorum chosen for each step with hindsight would take {bound:.3f} times as long"
    )
