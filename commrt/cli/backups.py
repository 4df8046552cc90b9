# SPDX-License-Identifier: Apache-2.0
"""What ``commrt simulate backup`` and ``commrt plan --backups`` share: the ways to split ranks, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import inf

import numpy as np
from numpy.random import Generator, default_rng
from rich.console import Console
from rich.table import Table

from commrt.cli.recorded import read
from commrt.errors import UsageError
from commrt.pricing.splits import Choice, PerRank, Published, Scaling, choose
from commrt.pricing.stragglers import Exponential, HeavyTails, Recorded, SlowSteps, Times, step_time_s

__all__ = ["Answer", "Question", "Row", "answer", "known", "show", "span"]

Sampled = HeavyTails | Exponential | SlowSteps

PAPER = "paper"
LAWS: dict[str, Sampled] = {PAPER: HeavyTails(), "exponential": Exponential(), "slow": SlowSteps()}
RANKS = 100
STEPS = 10_000
MOST_TIMES = 20_000_000
"""What fits into memory several times over."""
FEW = 12
"""A table has a row for each number of backups up to this one, or for as many spread over more."""


@dataclass(frozen=True, slots=True)
class Question:
    """The options as given; None where one was left out."""

    ranks: int | None
    steps: int | None
    seed: int
    law: str | None
    parameters: Sequence[str]
    """Of the law, each as NAME=NUMBER."""
    times: str | None
    """A file."""
    exponent: float | None
    interpolation: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to split the ranks."""

    quorum: int
    backups: int
    kth_time_s: float
    """Mean time of a step if all ranks begin each step together."""
    expected_kth_time_s: float | None
    """The same of the law itself, where it has a closed form."""
    hours: float | None
    """To the goal."""
    relative_time: float | None
    """To the goal, compared with waiting for all."""
    late_finish_step_s: float
    """Mean time of a step if a late rank first finishes the gradient that nobody wants any more."""
    late_finish_relative_time: float | None


COLUMNS: tuple[tuple[str, Callable[[Row], float | None]], ...] = (
    ("wait for", lambda row: row.quorum),
    ("backups", lambda row: row.backups),
    ("step, s", lambda row: row.kth_time_s),
    ("closed form", lambda row: row.expected_kth_time_s),
    ("hours", lambda row: row.hours),
    ("time", lambda row: row.relative_time),
    ("step, s *", lambda row: row.late_finish_step_s),
    ("time *", lambda row: row.late_finish_relative_time),
)


@dataclass(frozen=True, eq=False)
class Answer:
    """What was weighed, and what came of it."""

    question: Question
    law: Sampled | Recorded
    goal: Published | Scaling
    times_s: Times
    choice: Choice

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.choice.kth_s)

    @property
    def backups(self) -> int:
        """How many are best."""
        return self.ranks - self.choice.best

    @property
    def expected_kth_s(self) -> PerRank:
        """[ranks]: in closed form, where the law has one; else nan."""
        expected_s = self.law.expected_kth_s(self.ranks)
        return np.full(self.ranks, np.nan) if expected_s is None else expected_s

    @property
    def hours(self) -> PerRank:
        """[ranks]: to the goal; nan where updates are unknown or were not counted."""
        return self.choice.goal_s * (1 / 3600 if self.goal.in_updates else np.nan)

    @property
    def relative_time(self) -> PerRank:
        """[ranks]: to the goal, compared with waiting for all."""
        return self.choice.goal_s / float(self.choice.goal_s[-1])

    def rows(self, quorums: Iterable[int] = ()) -> list[Row]:
        """A row for each of `quorums`, for those near the best, and for the best if late ranks finish first."""
        most = min(self.ranks - 1, max(FEW, 2 * self.backups))
        near = self.ranks - np.linspace(0, most, FEW + 1).round().astype(int)
        needed = np.array(sorted({*quorums, *near.tolist(), self.choice.best, self.best_if_late_finish}))
        late_s = step_time_s(self.times_s, needed)
        late = late_s * self.goal.iterations(needed) / self.choice.goal_s[-1]
        of_all = (self.choice.kth_s, self.expected_kth_s, self.hours, self.relative_time)
        columns = (*(column[needed - 1] for column in of_all), late_s, late)
        cells = zip(*map(known, columns), strict=True)
        return [Row(quorum, self.ranks - quorum, *rest) for quorum, rest in zip(needed.tolist(), cells, strict=True)]

    @cached_property
    def best_if_late_finish(self) -> int:
        """Of quorums that backup workers may have, found by looking closer and closer: all at once would take long."""
        low, high = self.ranks - (self.ranks - 1) // 2, self.ranks
        while True:
            tried = np.unique(np.linspace(low, high, FEW + 1).round().astype(int))
            goal_s = step_time_s(self.times_s, tried) * self.goal.iterations(tried)
            best = len(tried) - 1 - int(np.where(np.isnan(goal_s), inf, goal_s)[::-1].argmin())
            if len(tried) == high - low + 1:
                return int(tried[best])
            low, high = int(tried[max(best - 1, 0)]), int(tried[min(best + 1, len(tried) - 1)])

    def record(self) -> dict[str, object]:
        """What was weighed, for JSON."""
        parameters = {"file": self.question.times} if isinstance(self.law, Recorded) else asdict(self.law)
        return {
            "ranks": self.ranks,
            "steps": len(self.times_s),
            "seed": self.question.seed,
            "law": {"name": _name(self.question)} | parameters,
            "iterations": {"name": type(self.goal).__name__.lower()} | asdict(self.goal),
            "sources": self.sources(),
        }

    def sources(self) -> str:
        """Whose figures these are."""
        return f"times: {_source_of_times(self)}; updates: {_source_of_updates(self.goal)}"


def answer(question: Question) -> Answer:
    """Read or sample times, then choose; raises `UsageError` if the options do not fit together."""
    rng = default_rng(question.seed)
    law = _law(question) if question.times is None else _recorded(question, question.times)
    times_s = law.times_s if isinstance(law, Recorded) else _sample(law, question, rng)
    goal = _goal(question, times_s.shape[1])
    return Answer(question, law, goal, times_s, choose(times_s, goal, rng))


def known(values: PerRank) -> list[float | None]:
    """For JSON, which has no nan."""
    return [None if np.isnan(value) else value for value in values.tolist()]


def show(found: Answer, rows: Sequence[Row], best: int) -> None:
    """Print `rows` as a table, that of `best` in bold, and say what the columns mean and whose figures they are."""
    columns = [column for column in COLUMNS if any(column[1](row) is not None for row in rows)]
    table = Table(title=f"{found.ranks} ranks, {len(found.times_s):,} steps")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for row in rows:
        style = "bold" if row.quorum == best else None
        table.add_row(*(_cell(value(row)) for _, value in columns), style=style)
    Console().print(table)
    print(
        "time: to the goal, compared with waiting for all\n*: if a late rank first finishes the gradient that nobody "
        f"wants any more; waiting for {found.best_if_late_finish} is then best"
    )
    print(found.sources())


def span(low: int, high: int) -> str:
    """How sure a choice is."""
    return f"{low} to {high} in 90 % of resamplings" if low < high else f"{low} in 90 % of resamplings and more"


def _cell(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:#.4g}"


def _recorded(question: Question, file: str) -> Recorded:
    if question.law or question.parameters or question.steps:
        raise UsageError("--times gives the times: leave out --law, --set and --steps, which are for sampled ones")
    law = read(file)
    ranks = law.times_s.shape[1]
    if question.ranks not in {None, ranks}:
        raise UsageError(f"{file} holds times of {ranks} ranks, not of {question.ranks}: leave --ranks out")
    return law


def _law(question: Question) -> Sampled:
    law = LAWS[_name(question)]
    return type(law)(**asdict(law) | dict(_parameter(law, text) for text in question.parameters))


def _parameter(law: Sampled, text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    names = [field.name for field in fields(law)]
    try:
        value = float(number)
    except ValueError:
        name = ""
    if name not in names:
        raise UsageError(f"--set {text}: write NAME=NUMBER, where NAME is one of {', '.join(names)}")
    return name, value


def _sample(law: Sampled, question: Question, rng: Generator) -> Times:
    ranks, steps = question.ranks or RANKS, question.steps or STEPS
    if ranks * steps > MOST_TIMES:
        raise UsageError(f"{steps:,} steps of {ranks:,} ranks are too many: give up to --steps {MOST_TIMES // ranks}")
    return law.sample(rng, steps, ranks)


def _goal(question: Question, ranks: int) -> Published | Scaling:
    """The published counts for the published law, unless options say otherwise."""
    if question.exponent is not None and question.interpolation is not None:
        raise UsageError("--interpolation is of the published counts, --exponent says to do without: leave one out")
    if question.exponent is not None:
        return Scaling(question.exponent)
    if question.interpolation is None and _name(question) != PAPER:
        return Scaling()
    goal = Published(power_law=question.interpolation == "power")
    if np.isnan(goal.iterations(np.array([ranks]))[0]):
        raise UsageError(
            f"the published counts of updates are for 50 to 100 gradients each, and say nothing of {ranks} ranks: give "
            "--exponent, 1 if twice the batch halves the updates, 0 if it does not help"
        )
    return goal


def _name(question: Question) -> str:
    return "recorded" if question.times is not None else question.law or PAPER


def _source_of_times(found: Answer) -> str:
    if isinstance(found.law, Recorded):
        return f"recorded, {found.question.times}"
    fitted = ", a fit of ours to two percentages published for 100 machines, as recalled"
    return f"sampled, {found.law}{fitted * (found.law == LAWS[PAPER])}"


def _source_of_updates(goal: Published | Scaling) -> str:
    if isinstance(goal, Scaling):
        return f"assumed to fall as (gradients per update)^-{goal.exponent:g}"
    between = "a power law" if goal.power_law else "a line"
    return f"Inception's with 50 and 100 gradients each, published, as recalled; {between} between"
