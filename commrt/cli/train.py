# SPDX-License-Identifier: Apache-2.0
"""``commrt train``: start local workers, show progress, end with a table."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from commrt.cli import job as running
from commrt.cli.averaging import Cost
from commrt.cli.job import Job, Result, work
from commrt.cli.mnist import load, require_images
from commrt.cli.outputs import json_of
from commrt.cli.reporting import facts, prepare, write
from commrt.cli.results import rows, title
from commrt.cli.workers import run_workers
from commrt.errors import CommrtError
from commrt.membership.launcher import chosen_transport, launched

__all__ = ["run"]


def run(job: Job, compare: Sequence[str], workers: int, as_json: bool) -> None:
    """Train `job`, then the same with each algorithm of `compare`, and report."""
    launch = launched()
    jobs = [job, *(replace(job, algorithm=name, trace=None) for name in compare)]
    for each in jobs:
        each.check(launch.size if launch else workers)
    chosen_transport()
    require_images()
    is_first = launch is None or launch.rank == 0
    path = prepare(job.report) if job.report is not None and is_first else None
    with _quiet_when_stopped():
        results = _work_through(jobs) if launch else _start(jobs, workers)
    if is_first:
        _report(results, as_json)
    if path is not None:
        _write_page(path, jobs, results)


@contextmanager
def _quiet_when_stopped() -> Iterator[None]:
    """Ctrl-C, or a signal that came as if it were that: one line, and the shell's exit code."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        received: signal.Signals = stopped.args[0] if stopped.args else signal.SIGINT
        print(f"commrt: stopped by {received.name}", file=sys.stderr)
        raise SystemExit(128 + received) from None


def _work_through(jobs: Sequence[Job]) -> list[Result]:
    """All `jobs` one after the other, as one worker; rank 0 shows progress on standard error."""
    launch = launched()
    data = load()
    results = []
    for job in jobs:
        with _bar(job, shown=launch is None or launch.rank == 0) as progress:
            results.append(work(job, data, progress))
    return results


def _start(jobs: Sequence[Job], workers: int) -> list[Result]:
    """As many workers anew for each of `jobs`: one may lose some."""
    _read_ahead()
    return [_run_by_workers(job, workers) for job in jobs]


def _read_ahead() -> None:
    """Read once what all workers will need. What is wrong with the images is theirs to say."""
    import_module("torch._dynamo")  # optimizers do, which takes as long as the rest of torch
    torch.set_num_threads(1)  # more cannot be handed on to forked workers
    with suppress(Exception):
        load()


def _run_by_workers(job: Job, workers: int) -> Result:
    """What the first worker that is left says; who is missing was lost."""
    try:
        results = run_workers(workers, lambda: _work_through([job])[0], job.outlives(workers), job.successors())
    finally:
        Console(stderr=True).show_cursor()  # the worker that hid it for its progress bar may have been killed
    first = results[min(results)]
    record = next((result.record for result in results.values() if result.record), None)
    return replace(first, record=record, lost=tuple(sorted({*range(workers)} - results.keys() | {*first.lost})))


@contextmanager
def _bar(job: Job, shown: bool) -> Iterator[running.Progress]:
    launch = launched()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss_column = TextColumn("loss {task.fields[loss]:.3f}{task.fields[late]}")
    with Progress(*columns, loss_column, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(job.algorithm, total=job.steps(launch.size if launch else 1), loss=float("nan"), late="")

        def show(step: int, loss: float, cost: Cost) -> None:
            late = f", {cost.dropped} dropped, {cost.saved_s:.1f} s not waited" if cost.dropped else ""
            bar.update(task, completed=step, loss=loss, late=late)

        yield show


def _report(results: Sequence[Result], as_json: bool) -> None:
    if as_json:
        first, *others = (result.facts() for result in results)
        print(json_of(first | {"compared": others}))
        return
    table = Table(title=title(results))
    table.add_column("")
    for result in results:
        table.add_column(result.algorithm, justify="right")
    for row in rows(results):
        table.add_row(*row)
    Console().print(table)


def _write_page(path: Path, jobs: Sequence[Job], results: Sequence[Result]) -> None:
    """After the table: whatever goes wrong here, that has been said. Raises `CommrtError`."""
    from commrt.cli.pages import Run, page  # noqa: PLC0415  # pictures take a second to import

    transports = [result.record.transport for result in results if result.record]
    try:
        runs = [Run(job, result) for job, result in zip(jobs, results, strict=True)]
        text = page(runs, [*facts(sys.argv, transports)])
    except Exception as error:
        raise CommrtError(
            f"the run is over, but its page could not be made: {type(error).__name__}: {error}"
        ) from error
    write(path, text)
    Console(stderr=True).print(f"report: {path}", highlight=False, soft_wrap=True)
