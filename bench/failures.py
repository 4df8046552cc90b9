# SPDX-License-Identifier: Apache-2.0
"""Measure how long N training steps take if something fails every T steps: ``python bench/failures.py``.

Several processes train the CNN of ``examples/mnist``. A process is killed, stopped for a while, or slow, raises an
error, or exits, once in 10, 30 or 100 steps on average. All contenders meet the same failures: when the run reaches a
step for the first time, a rank is hit. A failure of a rank that has no process at that time hits nobody.

* ddp, ddp-commrt: DDP over Gloo and over commrt. torchrun's agent starts all ranks again, from a checkpoint.
* backup1, backup2: `BackupWorkers`. Another process takes the place of each that ended.
* gossip, local: `Gossip()` and `LocalSGD`. The others go on without the process that ended.
* torchft: as for backup workers, but the others repeat the step without the process that ended.

Processes start forked from one that has imported torch and commrt, for all contenders. The command exits with 1 if a
run does not end, if processes end with different weights, or if backup workers lose an update, or make one twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse, which prints several lines per step
from failures_audit import Result, result_of
from failures_plan import CONTENDERS, Job, checkpoint_interval, draw
from failures_report import draw_picture, records_of, tables
from failures_runs import run
from failures_worker import fresh, prepare_images, save_state
from records import append, read

__all__ = ["measure", "one"]

HERE = Path(__file__).parent
LIMIT_S = 60.0
"""A run may take so long, and ten times as long as its steps compute."""


def main() -> None:
    """Run the command."""
    options = _options()
    if options.table is not None:
        records = read([options.table])
        draw_picture(records, HERE.parent / "docs" / "pictures" / "failures.svg")
        print(tables(records))
        return
    begin_s = perf_counter()
    torch.set_num_threads(1)
    rows = [found.as_dict() for found in measure(options)]
    about = {"steps": options.steps, "ranks": options.ranks, "compute_s": options.compute_ms / 1e3}
    records = list(records_of(rows, **about))
    append(options.records, records)
    print(json.dumps({"runs": rows, "records": records}) if options.json else tables(records))
    wrong = sum(len(row["complaints"]) for row in rows)
    print(f"{len(rows)} runs, {wrong} complaints, in {perf_counter() - begin_s:.0f} s", file=sys.stderr)
    sys.exit(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="updates of a run")
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 30, 10], help="mean steps between failures")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds: of the weights, images and failures")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--compute-ms", type=float, default=50.0, help="sleep of a step, as if a GPU were busy")
    parser.add_argument("--json", action="store_true", help="print runs and records as JSON")
    parser.add_argument("--records", type=Path, help="append records to this file")
    parser.add_argument("--table", type=Path, help="only print the tables of these records, and draw their picture")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Iterator[Result]:
    """Yield the figures of all runs. The contenders take turns within each seed and rate."""
    contenders = [name for name in options.contenders if name != "torchft" or _has_torchft()]
    with tempfile.TemporaryDirectory() as root:
        prepare_images(Path(root))
        checkpoint_s, step_s = _checkpoint_s(Path(root)), options.compute_ms / 1e3
        for seed in range(options.seeds):
            for every in (None, *options.rates):
                interval = checkpoint_interval(checkpoint_s, step_s, every)
                for contender in contenders:
                    found = one(Path(root), contender, every, seed, options, interval)
                    if (contender, every) == ("ddp", None):
                        step_s = found.seconds / options.steps
                    _say(found, interval, checkpoint_s)
                    yield found


def _has_torchft() -> bool:
    if find_spec("torchft") is not None:
        return True
    print("torchft is not installed: pip install 'commrt[test]' installs it on Linux, x86_64", file=sys.stderr)
    return False


def one(root: Path, contender: str, every: int | None, seed: int, options: argparse.Namespace, interval: int) -> Result:
    """Run a contender once, and return its figures."""
    folder = root / f"{contender}-{every}-{seed}"
    folder.mkdir()
    (folder / "images.pt").symlink_to(root / "images.pt")
    job = Job(contender, str(folder), options.ranks, options.steps, options.compute_ms / 1e3, seed, interval)
    limit_s = LIMIT_S + 10 * job.steps * job.compute_s
    found = result_of(run(job, draw(seed, every, job.steps, job.ranks), limit_s), every)
    shutil.rmtree(folder)
    return found


def _checkpoint_s(root: Path) -> float:
    """Return the seconds that a checkpoint takes: the median of several."""
    model, optimizer = fresh(0)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    times_s = []
    for _ in range(9):
        begin_s = perf_counter()
        save_state(root / "a-checkpoint.pt", model, optimizer, 0)
        times_s.append(perf_counter() - begin_s)
    return median(times_s)


def _say(found: Result, interval: int, checkpoint_s: float) -> None:
    """Print one run to the standard error output."""
    gaps = ", ".join(f"{kind} {' '.join(f'{gap:.2f}' for gap in each)}" for kind, each in found.gaps_s.items())
    words: Sequence[Any] = (
        f"seed {found.seed}, every {found.every}: {found.contender:<10} {found.seconds:6.2f} s",
        f"{found.hit}/{found.failures} failures, {found.restarted} restarts, {found.replaced} replaced",
        f"{found.updates_lost} updates lost, samples {found.samples_twice} twice, {found.samples_never} never",
        f"loss {found.loss:.3f}, a checkpoint of {1e3 * checkpoint_s:.1f} ms every {interval} steps" * bool(interval)
        or f"loss {found.loss:.3f}",
        f"longest gaps: {gaps}" * bool(gaps),
        f"errors: {' / '.join(each[:160] for each in found.errors)}" * bool(found.errors),
        "; ".join(found.complaints),
    )
    print(", ".join(word for word in words if word), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
