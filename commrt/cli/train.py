# SPDX-License-Identifier: Apache-2.0
"""``commrt train``: start local workers with torch's own elastic launcher, show progress, end with a table."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import resource_tracker

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from commrt.cli import job as running
from commrt.cli.job import Job, Result, work
from commrt.cli.mnist import load, require_images
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.launch import LOOPBACK, chosen_transport, launched

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

BAD_INPUT = {kind.__name__: kind for kind in (UsageError, ScheduleError, DisagreementError)}


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
    """Ctrl-C, or a signal that torch's launcher has passed on to the workers: one line, and the shell's exit code."""
    try:
        yield
    except (KeyboardInterrupt, SignalException) as stopped:
        received = stopped.sigval if isinstance(stopped, SignalException) else signal.SIGINT
        Console(stderr=True).show_cursor()  # the worker that hid it for its progress bar may have been killed
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


@contextmanager
def _ctrl_c_for_this_process_first() -> Iterator[None]:
    """Workers are born with SIGINT blocked: interrupted while they import torch, each would print a traceback.

    Here it still arrives, on a thread that does not block it, and is handled on the main thread as ever.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts, which is before the first worker else
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        over.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@record  # hands a worker's error to the launcher
def _work_as_child(jobs: Sequence[Job]) -> list[Result]:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # torch's launcher ends an interrupted worker quietly
    return _work_through(jobs)


def _quieten_launcher() -> None:
    """Each of its loggers has a level of its own; what goes wrong is raised too."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _start(jobs: Sequence[Job], workers: int) -> list[Result]:
    _quieten_launcher()
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
    )
    config.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"  # on Ctrl-C workers get SIGTERM, which they cannot put off
    try:
        with _ctrl_c_for_this_process_first():
            results: dict[int, list[Result]] = elastic_launch(config, _work_as_child)(jobs)
    except ChildFailedError as failed:
        raise _error_of(*failed.get_first_failure()) from failed
    return results[0]


def _error_of(rank: int, failure: ProcessFailure) -> CommrtError:
    """What a worker raised is in a record, what killed it is plain text; bad input stays bad input."""
    message: object = failure.message  # torch declares text only
    text = str(message["message"] if isinstance(message, dict) else message)
    return BAD_INPUT.get(text.partition(":")[0], CommrtError)(f"worker {rank} failed: {text}")


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
