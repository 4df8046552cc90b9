# SPDX-License-Identifier: Apache-2.0
"""``commrt train``: start local workers, show progress, end with a table."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from commrt.cli import job as running
from commrt.cli.averaging import Cost
from commrt.cli.job import Job, Result, work
from commrt.cli.mnist import load, require_images
from commrt.cli.recipes import PLAIN
from commrt.cli.workers import run_workers
from commrt.launch import chosen_transport, launched

__all__ = ["run"]

ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("test accuracy", lambda r: f"{r.test_accuracy:.1%}"),
    ("images/s", lambda r: f"{r.images_per_second:,.0f}"),
    ("step time", lambda r: f"{r.step_seconds * 1e3:.2f} ms"),
    ("communication not hidden", lambda r: f"{r.exposed_comm_seconds * 1e3:.2f} ms"),
    ("communication in all", lambda r: "-" if r.comm_seconds is None else f"{r.comm_seconds * 1e3:.2f} ms"),
    ("sent per rank and step", lambda r: "-" if r.bytes_sent_per_step is None else f"{r.bytes_sent_per_step:,} B"),
    ("replicas apart by", lambda r: f"{r.disagreement:.2g}"),
    ("replicas bitwise equal", lambda r: "yes" if r.replicas_equal else "NO"),
)
LATE_ROW: tuple[str, Callable[[Result], str]] = (
    "gradients too late",
    lambda r: ", ".join(f"rank {rank}: {late}" for rank, late in r.late.items() if late) or "none",
)
SAVED_ROW: tuple[str, Callable[[Result], str]] = ("not waited for them", lambda r: f"{r.saved_seconds:.1f} s")
LOST_ROW: tuple[str, Callable[[Result], str]] = ("workers lost", lambda r: ", ".join(map(str, r.lost)) or "none")


def run(job: Job, compare: Sequence[str], workers: int, as_json: bool) -> None:
    """Train `job`, then the same with each algorithm of `compare`, and report."""
    launch = launched()
    jobs = [job, *(replace(job, algorithm=name, trace=None) for name in compare)]
    for each in jobs:
        each.check(launch.size if launch else workers)
    chosen_transport()
    require_images()
    with _quiet_when_stopped():
        results = _work_through(jobs) if launch else _start(jobs, workers)
    if launch is None or launch.rank == 0:
        _report(results, as_json)


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
    return replace(first, lost=tuple(sorted({*range(workers)} - results.keys() | {*first.lost})))


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
        first, *others = (asdict(result) for result in results)
        print(json.dumps(first | {"compared": others}))
        return
    workers = results[0].workers
    recipe = f", recipe {results[0].recipe}" if results[0].recipe != PLAIN else ""
    title = f"{workers} worker{'s' * (workers > 1)}, {results[0].steps} steps, {results[0].wire} wire{recipe}"
    table = Table(title=title)
    table.add_column("")
    for result in results:
        table.add_column(result.algorithm, justify="right")
    rows = [*ROWS]
    rows += [LATE_ROW, SAVED_ROW] if any(any(result.late.values()) for result in results) else []
    rows += [LOST_ROW] if any(result.lost for result in results) else []
    for title, cell in rows:
        table.add_row(title, *(cell(result) for result in results))
    Console().print(table)
