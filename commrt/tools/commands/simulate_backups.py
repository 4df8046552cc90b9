# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate backups``: prints what backup workers cost and save, and how many to use.

The numbers are those of `backup_estimate`. Needs no torch.
"""

from __future__ import annotations

from math import isnan
from typing import Any

from rich.console import Console

from commrt.tools.commands.arguments import BackupOptions, Json
from commrt.tools.commands.backup_estimate import BackupEstimate, estimate_backups
from commrt.tools.commands.output import json_of, table_of

COLUMNS = {
    "quorum": "wait for",
    "backups": "backups",
    "kth_time_s": "step, s",  # mean, if all ranks begin each step together
    "hours": "hours",  # to the goal
    "relative_time": "time",  # to the goal, compared with waiting for all
    # mean, if a late rank finishes its gradient before it goes on
    "late_finish_step_s": "step, s *",
    "late_finish_relative_time": "time *",
}
"""Titles of the columns of `BackupEstimate.rows`."""


def backups(options: BackupOptions, as_json: Json = False) -> None:
    """Estimate steps that wait for some of the ranks, and recommend how many backups to use."""
    found = estimate_backups(options)
    if as_json:
        print(json_of(found.record()))
        return
    rows = found.rows
    best = found.best_if_late_finish
    shown = {
        name: title for name, title in COLUMNS.items() if not all(isnan(row[name]) for row in rows)
    }
    cells = ([_cell(row[name]) for name in shown] for row in rows)
    title = f"{found.ranks} ranks, {len(found.times_s):,} steps"
    Console().print(table_of(title, [*shown.values()], cells, rows.index(best)))
    print("time: to the goal, compared with waiting for all")
    print("*: if a late rank finishes its gradient before it goes on, as in commrt")
    print(found.sources())
    print(_advice(found, best))


def _cell(value: float) -> str:
    return "-" if isnan(value) else str(value) if isinstance(value, int) else f"{value:#.4g}"


def _advice(found: BackupEstimate, best: dict[str, Any]) -> str:
    least, most = found.choice.likely
    low = found.ranks - most
    high = found.ranks - least
    return (
        f"use {best['backups']} backups: the goal takes {best['late_finish_relative_time']:.2f} of"
        " the time without\nthe published rule, by which all begin each step together, says"
        f" {found.ranks - found.choice.best} ({low} to {high} in 90 % of resamplings)"
    )
