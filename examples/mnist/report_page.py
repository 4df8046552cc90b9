# SPDX-License-Identifier: Apache-2.0
"""The page of ``--report``: one file that loads nothing else. Its text is in page.html.j2."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from curve_charts import data_url, draw_curves, draw_members, steps_per_column
from history import MAX_ITERATIONS, Iteration, RankHistory, RunRecord
from job import ALGORITHMS, BACKUP, DDP, DIRECT, GOSSIP, LOCAL, WIRES
from result import Result
from results_table import heading, rows, title

import commrt
from commrt.errors import UsageError
from commrt.tools.measuring.doctor_environment import cpus
from commrt.tools.pictures.drawing import draw_recorded_step, draw_schedule
from commrt.tools.pictures.files import require_writable, spans_of

__all__ = ["environment_facts", "page", "prepare_report"]

OPTION, NAME = "--report", "report.html"
GENERATOR = "examples/mnist/train.py --report"
"""Marks the head of a page that this program wrote."""
SCHEDULED = {GOSSIP: "the first step", LOCAL: "each average"}
"""Where it is not of each step."""
PACKAGES = ("commrt", "torch", "numpy", "matplotlib", "mlxtend")
NOTHING_RECORDED = RunRecord("unknown", ())


def prepare_report(folder: str) -> Path:
    """Make `folder`, and return the path of the page in it.

    Raise `UsageError` if `folder` cannot be written, if it contains a page that this program did not write, or if a
    package that the page needs is missing.
    """
    if not folder:
        raise UsageError(f'{OPTION} "": the name of the folder is empty: give one, such as {OPTION} out')
    for package in ("jinja2", "matplotlib"):
        if find_spec(package) is None:
            raise UsageError(f"{OPTION} needs {package}: pip install 'commrt[demo]'")
    path = Path(folder) / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_ours = not path.exists() or GENERATOR in path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{OPTION} {folder}: nothing can be written there: {error}") from error
    require_writable(OPTION, str(path), NAME)
    if not is_ours:
        raise UsageError(
            f"{OPTION} {folder}: there is a {NAME} that commrt did not write: move it, or name another folder"
        )
    return path


def environment_facts(command: Sequence[str], transports: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Return names and values of what the runs ran on, for the page."""
    yield "command", shlex.join([Path(command[0]).name, *command[1:]])
    yield "written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield "exchanged over", ", ".join(dict.fromkeys(transports))
    yield "processors", f"{cpus():g}"
    yield "machine", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "from a source tree"
    yield "kept", f"the first {MAX_ITERATIONS:,} passes of each rank"


def page(results: Sequence[Result], backups: int, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page as HTML; `backups` is the number of backup workers, `facts` are from `environment_facts`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415  # an extra

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        generator=GENERATOR,
        names=[heading(result, results[0]) for result in results],
        title=title(results),
        rows=[*rows(results)],
        charts=_curves(results),
        left_out=sum(history.left_out for result in results for history in _record(result).histories),
        runs=[_run_section(result, backups) for result in results],
        facts=facts,
    )


def _record(result: Result) -> RunRecord:
    return result.record or NOTHING_RECORDED


class _Picture(NamedTuple):
    caption: str
    url: str


def _curves(results: Sequence[Result]) -> list[_Picture]:
    end = max(result.steps for result in results)
    recorded = {each.algorithm: [i for h in _record(each).histories for i in h.iterations] for each in results}

    def chart(name: str, value: Callable[[Iteration], float], high: float | None = None) -> _Picture:
        curves = {run: [(each.step, value(each)) for each in iterations] for run, iterations in recorded.items()}
        return _Picture(name, data_url(draw_curves(curves, end, high)))

    return [
        chart("Loss", lambda each: each.loss),
        chart("Accuracy on each step's images, %", lambda each: 100 * each.accuracy, 102.0),
        chart("Time of a step, ms", lambda each: 1e3 * each.seconds),
    ]


def _run_section(result: Result, backups: int) -> dict[str, Any]:
    """Return what the page shows of one run; a string stands for a picture that cannot be drawn, and says why."""
    record = _record(result)
    histories = {history.rank: history for history in record.histories}
    return {
        "name": result.algorithm,
        "timeline": _timeline(record, result.algorithm),
        "mix_counts": record.mix_counts(result.workers) if result.algorithm == GOSSIP else None,
        "contributions": _contributions(result, record),
        "ranks": [_rank_row(rank, histories.get(rank)) for rank in range(result.workers)],
        "lost": [*_lost_ranks(result, record)],
        "schedule": _schedule(result, backups),
    }


def _timeline(record: RunRecord, name: str) -> _Picture | str:
    events = [event for history in record.histories for event in history.events]
    try:
        figure = draw_recorded_step(spans_of(events), name)
    except UsageError as error:
        return f"{error}."
    if figure is None:
        return "No step was recorded."
    return _Picture("Timeline of a typical step", data_url(figure))


def _schedule(result: Result, backups: int) -> _Picture | str:
    if result.algorithm == DDP:
        return "torch's DDP chooses among Gloo's own algorithms: there is no schedule to show."
    if result.algorithm == BACKUP:
        backup = commrt.BackupWorkers(backups)
        needed = backup.needed(result.workers)
        schedule = backup.inner.schedule(0, needed)
        caption = f"The schedule of {needed} of the ranks, by their places among those that count in a step"
    else:
        is_quantized = result.algorithm == LOCAL and isinstance(WIRES[result.wire], commrt.quantization.Quantizer)
        carrier = DIRECT if is_quantized else result.algorithm
        schedule = ALGORITHMS[carrier]().schedule(0, result.workers)
        caption = f"The schedule of {SCHEDULED.get(result.algorithm, 'each step')}"
    try:
        return _Picture(caption, data_url(draw_schedule(schedule)))
    except UsageError as error:
        return f"{error}."


def _contributions(result: Result, record: RunRecord) -> _Picture | str:
    found = record.members_by_step()
    if not found:
        return "No rank that was left at the end recorded it."
    is_mean_of_weights = result.algorithm in {GOSSIP, LOCAL}
    took, take = ("took part in", "take part") if is_mean_of_weights else ("counted in", "count")
    if set(found.values()) == {frozenset(range(result.workers))}:
        return f"All {result.workers} ranks {took} each of {len(found):,} steps."
    width = steps_per_column(result.steps)
    column = "a column is a step" if width == 1 else f"a column is {width} steps, in between where it was in some"
    caption = f"Blue: it {took} the step; orange: it did not {take}; {column}"
    return _Picture(caption, data_url(draw_members(found, result.workers, result.steps)))


def _rank_row(rank: int, history: RankHistory | None) -> list[str]:
    if history is None or not history.iterations:
        return [f"rank {rank}", *["-"] * 7]
    averaged = history.averaged_steps
    sent = [step.nbytes_sent for step in averaged if step.nbytes_sent is not None]
    return [
        f"rank {rank}",
        f"{len(history.iterations) + history.left_out:,}",
        f"{sum(step.counted for step in averaged):,} steps",
        f"{1e3 * median(each.seconds for each in history.iterations):.2f} ms",
        _mean_ms([step.exposed_s for step in averaged]),
        _mean_ms([step.comm_s for step in averaged if step.comm_s is not None]),
        " to ".join(f"{nbytes:,}" for nbytes in sorted({min(sent), max(sent)})) + " B" if sent else "-",
        f"{sum(sent):,} B" if sent else "-",
    ]


def _mean_ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * fmean(seconds):.2f} ms" if seconds else "-"


def _lost_ranks(result: Result, record: RunRecord) -> Iterator[str]:
    """Return when and why each rank was lost, as far as the remaining ranks know."""
    known, found = {lost.rank: lost for lost in record.lost}, record.members_by_step()
    for rank in result.lost:
        steps = [step for step, members in found.items() if rank in members]
        last = f"step {max(steps)} was the last in which it counted" if steps else "it counted in no recorded step"
        noticed = "no rank waited for it after that"
        if rank in known:
            noticed = f"the others noticed in step {known[rank].step}: {known[rank].why}"
        yield f"Rank {rank}: {last}; {noticed}"
