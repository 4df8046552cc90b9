# SPDX-License-Identifier: Apache-2.0
"""What backup workers cost and save, for the options of ``simulate backups`` and ``plan backups``.

Times of ranks are sampled, or read from the user's file. Prints nothing, and needs no torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from commrt.errors import UsageError
from commrt.tools.commands.arguments import BackupOptions
from commrt.tools.commands.recorded_times import read_times
from commrt.tools.planning import stragglers
from commrt.tools.planning.computing_times import Exponential, HeavyTails, SlowSteps, Times

Sampled = HeavyTails | Exponential | SlowSteps
LAWS: dict[str, Sampled] = {
    "paper": HeavyTails(),
    "exponential": Exponential(),
    "slow": SlowSteps(),
}
RANKS = 100
STEPS = 10_000
MOST_TIMES = 20_000_000
"""Defaults, and the most times of ranks in steps: they fit into memory several times over."""
FEW = 12
GROWTH = 1.25
"""Up to `FEW` backups each number is tried; later ones grow by this factor."""


@dataclass(frozen=True, eq=False)
class BackupEstimate:
    """What backup workers cost and save, for each quorum."""

    options: BackupOptions
    law: Sampled | None
    """None for recorded times."""
    goal: stragglers.Goal
    times_s: Times
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
        """Return a row for each split that is tried; that without backups last."""
        best = self.ranks - self.choice.best
        backups = np.array(tried_backups(self.ranks, best)[::-1])
        needed = self.ranks - backups
        late_s = stragglers.step_time_s(self.times_s, needed)
        relative = late_s * self.goal.iterations(needed) / self.choice.goal_s[-1]
        columns = {"quorum": needed, "backups": backups}
        columns |= {name: each[needed - 1] for name, each in self.per_quorum.items()}
        columns |= {"late_finish_step_s": late_s, "late_finish_relative_time": relative}
        cells = {name: column.tolist() for name, column in columns.items()}
        return [{name: cells[name][row] for name in cells} for row in range(len(needed))]

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


def tried_backups(ranks: int, best: int) -> list[int]:
    """Return the numbers of backups to try, in order: all up to `FEW`, `best`, and some larger.

    >>> tried_backups(100, best=6)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 19, 24, 30, 38, 48]
    """
    tried = {*range(FEW + 1), best}
    larger = ceil(GROWTH * max(tried))
    while larger <= (ranks - 1) // 2:
        tried.add(larger)
        larger = ceil(GROWTH * larger)
    return sorted(number for number in tried if number < ranks)


def estimate_backups(options: BackupOptions) -> BackupEstimate:
    """Read or sample times, choose a quorum; raises `UsageError` if the options do not fit."""
    rng = default_rng(options.seed)
    law = _law(options) if options.times is None else None
    times_s = (
        _recorded(options, options.times or "") if law is None else _sampled(law, options, rng)
    )
    goal = _goal(options, times_s.shape[1])
    return BackupEstimate(options, law, goal, times_s, stragglers.choose(times_s, goal, rng))


def _sampled(law: Sampled, options: BackupOptions, rng: Generator) -> Times:
    ranks = options.ranks or RANKS
    steps = options.steps or STEPS
    if ranks * steps > MOST_TIMES:
        most = MOST_TIMES // ranks
        raise UsageError(
            f"{steps:,} steps of {ranks:,} ranks are too many: give up to --steps {most}"
        )
    return law.sample(rng, steps, ranks)


def _recorded(options: BackupOptions, file: str) -> Times:
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
