# SPDX-License-Identifier: Apache-2.0
"""``commrt train``: start local workers with torch's own elastic launcher, show progress, end with a table."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from commrt.cli import job as running
from commrt.cli.job import Job, Result, work
from commrt.cli.mnist import load
from commrt.errors import CommrtError
from commrt.launch import LOOPBACK, launched

__all__ = ["run"]

SHUTDOWN_S = 5
ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("test accuracy", lambda r: f"{r.test_accuracy:.1%}"),
    ("images/s", lambda r: f"{r.images_per_second:,.0f}"),
    ("step time", lambda r: f"{r.step_seconds * 1e3:.2f} ms"),
    ("communication not hidden", lambda r: f"{r.exposed_comm_seconds * 1e3:.2f} ms"),
    ("communication in all", lambda r: "-" if r.comm_seconds is None else f"{r.comm_seconds * 1e3:.2f} ms"),
    ("sent per rank and step", lambda r: "-" if r.bytes_sent_per_step is None else f"{r.bytes_sent_per_step:,} B"),
    ("replicas bitwise equal", lambda r: "yes" if r.replicas_equal else "NO"),
)


def run(job: Job, compare: Sequence[str], workers: int, as_json: bool) -> None:
    """Train `job`, then the same with each algorithm of `compare`, and report."""
    launch = launched()
    jobs = [job, *(replace(job, algorithm=name) for name in compare)]
    for each in jobs:
        each.check(launch.size if launch else workers)
    results = _work_through(jobs) if launch else _start(jobs, workers)
    if launch is None or launch.rank == 0:
        _report(results, as_json)


def _work_through(jobs: Sequence[Job]) -> list[Result]:
    """All `jobs` one after the other, as one worker; rank 0 shows progress on standard error."""
    launch = launched()
    data = load()
    results = []
    for job in jobs:
        with _bar(job, shown=launch is None or launch.rank == 0) as progress:
            results.append(work(job, data, progress))
    return results


@record  # hands a worker's error to the launcher
def _work_as_child(jobs: Sequence[Job]) -> list[Result]:
    return _work_through(jobs)


def _start(jobs: Sequence[Job], workers: int) -> list[Result]:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="commrt",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        **_shutdown(),
    )
    try:
        results: dict[int, list[Result]] = elastic_launch(config, _work_as_child)(jobs)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        what = f"worker {rank} failed: {_sentence(failure.message)}. Its own output, if any, stands above"
        raise CommrtError(what) from failed
    except SignalException as signalled:  # torch has ended the workers
        raise KeyboardInterrupt from signalled
    return results[0]


def _shutdown() -> dict[str, Any]:
    """How long a worker that was told to end may take; one that is stopped never will."""
    known = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))  # not by torch 2.11
    return {"shutdown_timeout": SHUTDOWN_S} if known else {}


def _sentence(message: str | dict[str, Any]) -> str:
    """What the worker said; a dict where torch's `record` wrote it."""
    text = message if isinstance(message, str) else str(message.get("message", "it did not say why"))
    return text.strip().rstrip(".")


@contextmanager
def _bar(job: Job, shown: bool) -> Iterator[running.Progress]:
    launch = launched()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    with Progress(*columns, loss_column, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(job.algorithm, total=job.steps(launch.size if launch else 1), loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def _report(results: Sequence[Result], as_json: bool) -> None:
    if as_json:
        first, *others = (asdict(result) for result in results)
        print(json.dumps(first | {"compared": others}))
        return
    workers = results[0].workers
    table = Table(title=f"{workers} worker{'s' * (workers > 1)}, {results[0].steps} steps, {results[0].wire} wire")
    table.add_column("")
    for result in results:
        table.add_column(result.algorithm, justify="right")
    for title, cell in ROWS:
        table.add_row(title, *(cell(result) for result in results))
    Console().print(table)
