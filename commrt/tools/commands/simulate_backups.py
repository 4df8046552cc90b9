# SPDX-License-Identifier: Apache-2.0
"""``commrt simulate backups``: steps that wait for some of the ranks, and how many backups to use.

Needs no torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf, isnan
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from rich.console import Console

from commrt.errors import UsageError
from commrt.tools.commands.arguments import BackupOptions, Json
from commrt.tools.commands.output import json_of, table_of
from commrt.tools.pictures.files import read_times
from commrt.tools.planning import stragglers

Sampled = stragglers.HeavyTails | stragglers.Exponential | stragglers.SlowSteps
LAWS: dict[str, Sampled] = {
    "paper": stragglers.HeavyTails(),
    "exponential": stragglers.Exponential(),
    "slow": stragglers.SlowSteps(),
}
RANKS = 100
STEPS = 10_000
MOST_TIMES = 20_000_000
"""Defaults, and the most times of ranks in steps: they fit into memory several times over."""
FEW = 12
GROWTH = 1.25
"""Up to `FEW` backups each number is tried; later ones grow by this factor."""
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
"""Titles of columns."""


@dataclass(frozen=True, eq=False)
class BackupEstimate:
    """What backup workers cost and save, for each quorum."""

    options: BackupOptions
    law: Sampled | None
    """None for recorded times."""
    goal: stragglers.Goal
    times_s: stragglers.Times
    choice: stragglers.QuorumChoice

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.choice.kth_s)

    @cached_property
    def per_quorum(self) -> dict[str, stragglers.PerRank]:
        """Return columns [ranks] for quorums of 1 to all ranks."""
        return {
            "kth_time_s": self.choice.kth_s,
            "hours": (
                self.choice.goal_s
                * (1 / 3600 if isinstance(self.goal, stragglers.Published) else np.nan)
            ),
            "relative_time": self.choice.goal_s / float(self.choice.goal_s[-1]),
        }

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return a row, by `COLUMNS`, for each split that is tried; that without backups last."""
        tried = {*range(FEW + 1), self.ranks - self.choice.best}
        while (larger := ceil(GROWTH * max(tried))) <= (self.ranks - 1) // 2:
            tried.add(larger)
        needed = np.array(
            [self.ranks - number for number in sorted(tried, reverse=True) if number < self.ranks]
        )
        late_s = stragglers.step_time_s(self.times_s, needed)
        late = late_s * self.goal.iterations(needed) / self.choice.goal_s[-1]
        known = [column[needed - 1] for column in self.per_quorum.values()]
        cells = [column.tolist() for column in (needed, self.ranks - needed, *known, late_s, late)]
        return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*cells, strict=True)]

    @cached_property
    def best_if_late_finish(self) -> dict[str, Any]:
        """Return the row of the best quorum that backup workers may have, of those tried."""
        allowed = [row for row in self.rows if row["backups"] <= (self.ranks - 1) // 2]
        return min(
            reversed(allowed),
            key=lambda row: np.nan_to_num(row["late_finish_relative_time"], nan=inf),
        )

    def record(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        choice = self.choice
        parameters = {"file": self.options.times} if self.law is None else asdict(self.law)
        columns = {
            name: None if np.isnan(each).all() else each.tolist()
            for name, each in self.per_quorum.items()
        }
        return {
            "ranks": self.ranks,
            "steps": len(self.times_s),
            "seed": self.options.seed,
            "law": {"name": self.options.law_name} | parameters,
            "iterations": {"name": type(self.goal).__name__.lower()} | asdict(self.goal),
            "sources": self.sources(),
            "best_quorum": choice.best,
            "backups": self.ranks - choice.best,
            "likely_quorums": choice.likely,
            "best_quorum_if_late_finish": self.best_if_late_finish["quorum"],
            **columns,
            "table": self.rows,
        }

    def sources(self) -> str:
        """Return where times and numbers of updates come from."""
        fitted = ", a fit of ours to two percentages published for 100 machines, as recalled"
        times = f"sampled, {self.law}{fitted * (self.law == LAWS['paper'])}"
        if self.law is None:
            times = f"recorded, {self.options.times}"
        updates = (
            "a line between Inception's with 50 and with 100 gradients each, published, as recalled"
        )
        if isinstance(self.goal, stragglers.Scaling):
            updates = f"assumed to fall as (gradients per update)^-{self.goal.exponent:g}"
        return f"times: {times}; updates: {updates}"


def estimate_backups(options: BackupOptions) -> BackupEstimate:
    """Read or sample times, choose a quorum; raises `UsageError` if the options do not fit."""
    rng = default_rng(options.seed)
    law = _law(options) if options.times is None else None
    times_s = (
        _recorded(options, options.times or "") if law is None else _sampled(law, options, rng)
    )
    goal = _goal(options, times_s.shape[1])
    return BackupEstimate(options, law, goal, times_s, stragglers.choose(times_s, goal, rng))


def _sampled(law: Sampled, options: BackupOptions, rng: Generator) -> stragglers.Times:
    ranks = options.ranks or RANKS
    steps = options.steps or STEPS
    if ranks * steps > MOST_TIMES:
        most = MOST_TIMES // ranks
        raise UsageError(
            f"{steps:,} steps of {ranks:,} ranks are too many: give up to --steps {most}"
        )
    return law.sample(rng, steps, ranks)


def _recorded(options: BackupOptions, file: str) -> stragglers.Times:
    if options.law or options.parameters or options.steps:
        raise UsageError("--times replaces sampled times: leave out --law, --set and --steps")
    times_s = read_times(file)
    ranks = times_s.shape[1]
    if options.ranks not in {None, ranks}:
        raise UsageError(
            f"{file} holds times of {ranks} ranks, not of {options.ranks}: leave --ranks out"
        )
    return times_s


def _law(options: BackupOptions) -> Sampled:
    law = LAWS[options.law_name]
    parameters = asdict(law)
    for text in options.parameters or ():
        name, _, number = text.partition("=")
        with suppress(ValueError):
            if name in parameters:
                parameters[name] = float(number)
                continue
        raise UsageError(
            f"--set {text}: write NAME=NUMBER, where NAME is one of {', '.join(parameters)}"
        )
    return type(law)(**parameters)


def _goal(options: BackupOptions, ranks: int) -> stragglers.Goal:
    """Return the published counts for the published law, unless --exponent is given."""
    if options.exponent is not None or options.law_name != "paper":
        return stragglers.Scaling(1.0 if options.exponent is None else options.exponent)
    if np.isnan(stragglers.Published().iterations(np.array([ranks]))[0]):
        raise UsageError(
            "the published counts of updates are for 50 to 100 gradients each, and say nothing of"
            f" {ranks} ranks: give --exponent, 1 if twice the batch halves the updates, 0 if it"
            " does not help"
        )
    return stragglers.Published()


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
    choice, (low, high) = (
        found.choice,
        (found.ranks - quorum for quorum in reversed(found.choice.likely)),
    )
    return (
        f"use {best['backups']} backups: the goal takes {best['late_finish_relative_time']:.2f} of"
        " the time without\nthe published rule, by which all begin each step together, says"
        f" {found.ranks - choice.best} ({low} to {high} in 90 % of resamplings)"
    )
