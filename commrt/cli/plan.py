# SPDX-License-Identifier: Apache-2.0
"""``commrt plan --backups``: how many backups to use, and why. Needs no torch.

It advises for ranks as they are here: one that is late finishes its gradient before it goes on with the others, and is
late for longer. That is what was measured (docs/evidence.md); the published rule is told beside it.
"""

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np

from commrt.algorithms.backup import BackupWorkers
from commrt.cli.backups import Answer, Question, Row, answer, show, span
from commrt.cli.outputs import json_of
from commrt.errors import UsageError
from commrt.pricing.planning import Waiting
from commrt.pricing.stragglers import step_time_s

__all__ = ["run", "waitings"]

AUTO = "auto"


def waitings(backups: str, question: Question) -> tuple[int, list[Waiting]]:
    """How many ranks there are, and what steps are with no backups and with `backups`.

    For auto with one, and with as many as are best where nothing is exchanged.
    """
    found = answer(question)
    if backups == AUTO:
        tried = {0, found.ranks - found.best_if_late_finish} | ({1} if found.ranks > 2 else set())
    else:
        tried = {0, _number(backups)}
    needed = np.array([BackupWorkers(number).needed(found.ranks) for number in sorted(tried)])
    updates = found.goal.iterations(needed) / found.goal.iterations(np.array([found.ranks]))
    for count, known in zip(needed, updates, strict=True):
        _require_known(int(count), None if np.isnan(known) else float(known))
    slower = step_time_s(found.times_s, needed) / float(np.median(found.times_s))
    columns = (column.tolist() for column in (found.ranks - needed, slower, updates))
    return found.ranks, [Waiting(*row) for row in zip(*columns, strict=True)]


def _require_known(quorum: int, figure: float | None) -> None:
    if figure is None:
        raise UsageError(f"nothing is known of updates with {quorum} gradients each: give fewer backups, or --exponent")


def run(backups: str, question: Question, as_json: bool) -> None:
    """Say how many backups to use, and how `backups` compares if it is a number."""
    wanted = None if backups == AUTO else _number(backups)
    found = answer(question)
    if wanted is not None and wanted >= found.ranks:
        raise UsageError(
            f"--backups {wanted} of {found.ranks} ranks leaves none to wait for: give up to {found.ranks - 1}"
        )
    rows = found.rows([] if wanted is None else [found.ranks - wanted])
    best = next(row for row in rows if row.quorum == found.best_if_late_finish)
    asked = best if wanted is None else next(row for row in rows if row.backups == wanted)
    _require_known(asked.quorum, asked.late_finish_relative_time)
    if as_json:
        print(json_of(_record(found, rows, best, asked)))
        return
    show(found, rows, best.quorum)
    print(_advice(found, rows, best))
    if asked != best:
        print(_comparison(asked, best))


def _number(backups: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", backups):
        raise UsageError(f"--backups {backups}: give auto, or a number")
    return int(backups)


def _record(found: Answer, rows: list[Row], best: Row, asked: Row) -> dict[str, object]:
    low, high = found.choice.likely
    return {
        "backups": best.backups,
        "best_quorum": best.quorum,
        "backups_if_all_begin_together": found.backups,
        "likely_backups_if_all_begin_together": [found.ranks - high, found.ranks - low],
        "asked": asdict(asked),
        "table": [asdict(row) for row in rows],
    } | found.record()


def _advice(found: Answer, rows: list[Row], best: Row) -> str:
    rule = (
        f"the published rule, by which all begin each step together, says {found.backups} "
        f"({span(found.ranks - found.choice.likely[1], found.ranks - found.choice.likely[0])})"
    )
    if not best.backups:
        return f"use no backups: steps that end sooner would save less than the updates they need more; {rule}"
    best_s, all_s = best.late_finish_step_s, rows[-1].late_finish_step_s
    time = best.late_finish_relative_time or 0.0
    return (
        f"use {_backups(best.backups)}: a step ends with gradient {best.quorum} of {found.ranks}, after {best_s:.4g} s "
        f"instead of {all_s:.4g} s, where a late rank first finishes its own; with {time * all_s / best_s:.2f} times "
        f"the updates the goal takes {time:.2f} of the time. {rule[0].upper()}{rule[1:]}"
    )


def _comparison(asked: Row, best: Row) -> str:
    ratio = (asked.late_finish_relative_time or 0.0) / (best.late_finish_relative_time or 1.0)
    return f"{_backups(asked.backups)}: {ratio:.2f} times as long as with {best.backups}"


def _backups(number: int) -> str:
    return f"{number} backup{'s' * (number != 1)}"
