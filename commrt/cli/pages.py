# SPDX-License-Identifier: Apache-2.0
"""The page of ``commrt train --report``: one file that asks for nothing else, light or dark as its reader is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

from commrt.algorithms.catalogue import GOSSIP
from commrt.cli.charts import Line, bins, grid, line_chart, matrix
from commrt.cli.history import History, Record, Turn
from commrt.cli.job import Job, Result
from commrt.cli.markup import Content, Markup, joined, tag
from commrt.cli.pictures import schedule_figure, timeline_figure
from commrt.cli.reporting import GENERATOR
from commrt.cli.results import rows, title
from commrt.cli.standing import contributors, last_counted, met, shares_of, width_of
from commrt.cli.style import STYLE

__all__ = ["Run", "page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser lets the page load: nothing."""

WORDS = (
    ("rank", "One of the worker processes, by its number."),
    ("step", "One update of the weights."),
    ("test accuracy", "Of the 1,000 images that nobody trained on, at the end, after all replicas were made equal."),
    ("accuracy over steps", "Of each step's own images, before its update."),
    ("step time", "Mean over the run, of the first rank that is left."),
    ("waited in a step", "For exchanges, and for slower workers, when its backward pass had nothing left to do."),
    ("communication in all", "How long packing, sending and adding took, hidden under the backward pass or not."),
    ("replicas apart before the end", "How far the farthest replica was from the mean of all, relative to it."),
    ("counted", "The step was made of this rank's gradients too; with backup workers they may have come too late."),
    ("met", "With gossip: weights of the one were mixed into those of the other."),
    ("lost", "A worker that was killed, or ended; the others went on without it."),
    (
        "schedule",
        "Who sends which part of the gradients to whom, and whether it is added there; proven before the run.",
    ),
)


class Run(NamedTuple):
    """One run of the command; `result` has its record."""

    job: Job
    result: Result

    @property
    def record(self) -> Record:
        """What was noted; nothing, where that was lost."""
        return self.result.record or Record("unknown", (), ())


def page(runs: Sequence[Run], facts: Sequence[tuple[str, str]]) -> str:
    """The whole page; `facts` are names and values of what the runs ran on."""
    names = ", ".join(run.result.algorithm for run in runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"commrt train: {names}"),
        tag("style", Markup(STYLE)),
    )
    body = tag(
        "body",
        tag("header", tag("h1", f"commrt train: {names}"), tag("p", title([run.result for run in runs]))),
        tag("main", _headline(runs), _over_steps(runs), [_one(run, number) for number, run in enumerate(runs)],
            _environment(facts), _words()),
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _section(name: str, *content: Content) -> Markup:
    return tag("section", tag("h2", name), content)


def _table(head: Sequence[Content], body: Sequence[Sequence[Content]]) -> Markup:
    """The first cell of each row is its name."""
    cells = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in body]
    columns = tag("tr", [tag("th", cell, scope="col") for cell in head])
    return tag("div", tag("table", tag("thead", columns), tag("tbody", cells)), class_="wide")


def _headline(runs: Sequence[Run]) -> Markup:
    results = [run.result for run in runs]
    return _section("Figures", _table(["", *(result.algorithm for result in results)], [*rows(results)]))


def _over_steps(runs: Sequence[Run]) -> Markup:
    def lines(value: Callable[[Turn], float]) -> list[Line]:
        return [Line(run.result.algorithm, bins(_values(run, value), run.result.steps)) for run in runs]

    end = max(run.result.steps for run in runs)
    left_out = sum(history.left_out for run in runs for history in run.record.histories)
    note = [tag("p", f"{left_out:,} passes after those were not kept.")] if left_out else []
    return _section(
        "Over the steps",
        tag(
            "p", "Means over all ranks that were left at the end; the pale band reaches from the lowest to the highest."
        ),
        note,
        line_chart("Loss", lines(lambda turn: turn.loss), "", end),
        line_chart("Accuracy on each step's images", lines(lambda turn: 100 * turn.accuracy), " %", end, top=100.0),
        line_chart("Time of a step", lines(lambda turn: 1e3 * turn.seconds), " ms", end),
    )


def _values(run: Run, value: Callable[[Turn], float]) -> list[tuple[int, float]]:
    return [(turn.step, value(turn)) for history in run.record.histories for turn in history.turns]


def _one(run: Run, number: int) -> Markup:
    result, record = run.result, run.record
    inside = [
        tag("h3", "A step"),
        timeline_figure(record, result.algorithm, f"run{number}"),
        tag("h3", "Who met whom" if result.algorithm == GOSSIP else "Who counted"),
        _who(run),
        tag("h3", "Ranks"),
        _ranks(run),
        _lost(run),
        tag("h3", "Schedule"),
        schedule_figure(run.job, result.workers, f"run{number}"),
    ]
    return _section(result.algorithm, inside)


def _who(run: Run) -> Content:
    result, found = run.result, contributors(run.record)
    names = [f"rank {rank}" for rank in range(result.workers)]
    everybody = frozenset(range(result.workers))
    parts: list[Content] = []
    if result.algorithm == GOSSIP:
        counts = met(run.record, result.workers)
        parts.append(matrix(
            "Steps in which the rank of a row mixed in the weights of the rank of a column", names, counts,
            lambda row, column: f"{names[row]} heard {names[column]} in {counts[row][column]} steps",
        ))  # fmt: skip
    took, take = ("took part in", "take part") if result.algorithm == GOSSIP else ("counted in", "count")
    if found and set(found.values()) == {everybody}:
        parts.append(tag("p", f"All {result.workers} ranks {took} each of {len(found):,} steps."))
    elif found:
        shares = shares_of(found, result.workers, result.steps)
        width = width_of(result.steps)
        each = "a column is a step" if width == 1 else f"a column is {width} steps, paler where it was in some of them"
        caption = f"Blue: it {took} the step; orange: it did not {take}; {each}"
        parts.append(grid(caption, names, shares, width, result.steps))
    else:
        parts.append(tag("p", "No rank that was left had noted it."))
    return parts


def _ranks(run: Run) -> Markup:
    histories = {history.rank: history for history in run.record.histories}
    head = ["", "passes", "counted in", "step, median", "not hidden", "communication", "sent per step", "sent in all"]
    body = [_rank_row(rank, histories.get(rank)) for rank in range(run.result.workers)]
    return _table(head, body)


def _rank_row(rank: int, history: History | None) -> list[str]:
    if history is None or not history.turns:
        return [f"rank {rank}", *["-"] * 7]
    shares = history.shares
    sent = [share.nbytes_sent for share in shares if share.nbytes_sent is not None]
    return [
        f"rank {rank}",
        f"{len(history.turns) + history.left_out:,}",
        f"{sum(share.counted for share in shares):,} steps",
        f"{1e3 * median(turn.seconds for turn in history.turns):.2f} ms",
        _mean_ms([share.exposed_s for share in shares]),
        _mean_ms([share.comm_s for share in shares if share.comm_s is not None]),
        _span(sent),
        f"{sum(sent):,} B" if sent else "-",
    ]


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * fmean(seconds):.2f} ms" if seconds else "-"


def _span(nbytes: Sequence[int]) -> str:
    if not nbytes:
        return "-"
    low, high = min(nbytes), max(nbytes)
    return f"{low:,} B" if low == high else f"{low:,} to {high:,} B"


def _lost(run: Run) -> Content:
    said = [*_departures(run), *_successions(run)]
    return tag("div", tag("h3", "Workers lost"), tag("ul", [tag("li", each) for each in said])) if said else []


def _successions(run: Run) -> Iterator[str]:
    """Who began later than the run did: one that took a lost rank's place."""
    for history in run.record.histories:
        if history.turns and history.turns[0].step > 0:
            step = history.turns[0].step
            yield f"Rank {history.rank} was lost; another process took its place, and began with step {step}"


def _departures(run: Run) -> Iterator[str]:
    """When, as far as those who are left know; what a lost rank had noted went with it."""
    known = {gone.rank: gone for gone in run.record.departures}
    found = contributors(run.record)
    for rank in run.result.lost:
        if rank in known:
            yield f"Rank {rank}, from step {known[rank].step} on: {known[rank].why}"
        elif (step := last_counted(found, rank)) is not None:
            yield f"Rank {rank}: step {step} was the last in which it counted; nobody waited for it after that"
        else:
            yield f"Rank {rank}: it counted in no step that the others noted"


def _environment(facts: Sequence[tuple[str, str]]) -> Markup:
    return _section("Environment", _table(["", ""], [(name, tag("code", value)) for name, value in facts]))


def _words() -> Markup:
    return _section("Words", tag("dl", joined([(tag("dt", word), tag("dd", meaning)) for word, meaning in WORDS])))
