# SPDX-License-Identifier: Apache-2.0
"""Run jobs one after the other, by local workers or as a rank of a launcher; show progress and a
table.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import import_module

import torch
from dataset import Images, load, require_images
from job import DIRECT, WIRES, Job
from result import Result
from results_table import results_table
from rich import progress
from rich.console import Console

import commrt
from commrt.store.launcher import launched
from commrt.testing.workers import run_workers
from commrt.tools.commands.output import json_of
from commrt.transport.names import chosen_transport

__all__ = ["Progress", "TrainRank", "default_algorithm", "run"]

TORUS = "torus2d"
Progress = Callable[[int, float, commrt.training.Stats], None]
"""Called after each step with the number of steps done, the loss,
and the totals of communication.
"""
TrainRank = Callable[[Job, tuple[Images, Images], Progress], Result]


def run(
    train_rank: TrainRank, job: Job, compare: Sequence[str], workers: int, as_json: bool
) -> None:
    """Train `job`, then the same with each algorithm of `compare`, and print the results."""
    launch = launched()
    jobs = [job, *map(job.compared, compare)]
    size = launch.size if launch else workers
    for each in jobs:
        each.check(size)
    chosen_transport()  # refuses a bad COMMRT_TRANSPORT
    require_images()
    is_first = launch is None or launch.rank == 0
    for sentence in _warnings(jobs, size) if is_first else []:
        print(f"commrt: {sentence}", file=sys.stderr)
    try:
        results = _train_all(train_rank, jobs) if launch else _start(train_rank, jobs, workers)
    except KeyboardInterrupt as stopped:  # Ctrl-C, or a signal that run_workers turned into it
        received: signal.Signals = stopped.args[0] if stopped.args else signal.SIGINT
        print(f"commrt: stopped by {received.name}", file=sys.stderr)
        raise SystemExit(128 + received) from None
    if is_first:
        _report(results, as_json)


def default_algorithm(wire: str) -> str:
    """Return the algorithm to train with if none is named, and say so if it is due to the wire."""
    if not isinstance(WIRES[wire], commrt.quantization.Quantizer):
        return TORUS
    launch = launched()
    if launch is None or launch.rank == 0:
        print(
            f"commrt: --wire {wire} travels by --algorithm {DIRECT}: codes do not add",
            file=sys.stderr,
        )
    return DIRECT


def _warnings(jobs: Sequence[Job], workers: int) -> list[str]:
    """Return what speaks against the settings of `jobs`, each sentence once."""
    return list(dict.fromkeys(sentence for job in jobs for sentence in job.unwise(workers)))


def _train_all(train_rank: TrainRank, jobs: Sequence[Job]) -> list[Result]:
    """Run all `jobs` as one rank; rank 0 shows progress on standard error."""
    launch = launched()
    data = load()
    results = []
    for job in jobs:
        with _bar(
            job, launch.size if launch else 1, shown=launch is None or launch.rank == 0
        ) as show:
            results.append(train_rank(job, data, show))
    return results


def _start(train_rank: TrainRank, jobs: Sequence[Job], workers: int) -> list[Result]:
    """Run each of `jobs` with new workers: a job may lose some."""
    import_module("torch._dynamo")  # optimizers import it, which takes as long as the rest of torch
    torch.set_num_threads(1)  # forked workers cannot inherit more
    with suppress(Exception):  # the workers report an error in the images
        load()
    return [_run_by_workers(train_rank, job, workers) for job in jobs]


def _run_by_workers(train_rank: TrainRank, job: Job, workers: int) -> Result:
    """Return the result of the first surviving worker; workers without a result are lost."""
    try:
        results = run_workers(
            workers, lambda: _train_all(train_rank, [job])[0], job.outlives(workers)
        )
    finally:
        # the worker that hid it for its progress bar may have been killed
        Console(stderr=True).show_cursor()
    first = results[min(results)]
    return replace(first, lost=tuple(sorted({*range(workers)} - results.keys() | {*first.lost})))


@contextmanager
def _bar(job: Job, workers: int, shown: bool) -> Iterator[Progress]:
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("loss {task.fields[loss]:.3f}{task.fields[late]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(job.algorithm, total=job.steps(workers), loss=float("nan"), late="")

        def show(step: int, loss: float, stats: commrt.training.Stats) -> None:
            late = (
                f", {stats.dropped} dropped, {stats.saved_s:.1f} s saved" if stats.dropped else ""
            )
            bar.update(task, completed=step, loss=loss, late=late)

        yield show


def _report(results: Sequence[Result], as_json: bool) -> None:
    if as_json:
        first, *others = (asdict(result) for result in results)
        print(json_of(first | {"compared": others}))
        return
    Console().print(results_table(results))
