# SPDX-License-Identifier: Apache-2.0
"""``commrt plan``: what to choose for a job, and why. So far: how many backups. Needs no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from commrt.cli.backups import Answer, Question, Row, answer, best_if_late_finish, show, span
from commrt.errors import UsageError

__all__ = ["run"]

AUTO = "auto"


def run(backups: str | None, question: Question, as_json: bool) -> None:
    """Say how many backups to use, and how `backups` compares if it is a number."""
    if backups is None:
        raise UsageError("so far a plan is of backups only: give --backups auto, or a number to compare with the best")
    wanted = None if backups == AUTO else _number(backups)
    found = answer(question)
    asked = found.choice.best if wanted is None else found.ranks - wanted
    if asked < 1:
        raise UsageError(
            f"--backups {wanted} of {found.ranks} ranks leaves none to wait for: give up to {found.ranks - 1}"
        )
    rows = found.rows([asked])
    chosen = next(row for row in rows if row.quorum == asked)
    if chosen.relative_time is None:
        raise UsageError(f"nothing is known of updates with {asked} gradients each: give fewer backups, or --exponent")
    if as_json:
        print(json.dumps(_record(found, rows, chosen)))
        return
    show(found, rows)
    print(_advice(found))
    if asked != found.choice.best:
        print(_comparison(found, asked))


def _number(backups: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", backups):
        raise UsageError(f"--backups {backups}: give auto, or a number")
    return int(backups)


def _record(found: Answer, rows: list[Row], chosen: Row) -> dict[str, object]:
    low, high = found.choice.likely
    return {
        "backups": found.backups,
        "best_quorum": found.choice.best,
        "likely_backups": [found.ranks - high, found.ranks - low],
        "backups_if_late_finish": best_if_late_finish(rows).backups,
        "asked": asdict(chosen),
        "table": [asdict(row) for row in rows],
    } | found.record()


def _advice(found: Answer) -> str:
    choice, ranks = found.choice, found.ranks
    likely = span(ranks - choice.likely[1], ranks - choice.likely[0])
    if not found.backups:
        return f"use no backups ({likely}): steps that end sooner would save less than the updates they need more"
    best_s, all_s, time = choice.kth_s[choice.best - 1], choice.kth_s[-1], found.relative_time[choice.best - 1]
    return (
        f"use {_backups(found.backups)} ({likely}): a step ends with gradient {choice.best} of {ranks}, after "
        f"{best_s:.4g} s instead of {all_s:.4g} s; with {time * all_s / best_s:.2f} times the updates the goal takes "
        f"{time:.2f} of the time"
    )


def _comparison(found: Answer, asked: int) -> str:
    ratio = found.choice.goal_s[asked - 1] / found.choice.goal_s[found.choice.best - 1]
    return f"{_backups(found.ranks - asked)}: {ratio:.2f} times as long as with {found.backups}"


def _backups(number: int) -> str:
    return f"{number} backup{'s' * (number != 1)}"
