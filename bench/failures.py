# SPDX-License-Identifier: Apache-2.0
"""Measure how long N training steps take if something fails every T steps: ``python bench/failures.py``.

Several processes train the CNN of ``examples/mnist``. A process is killed, stopped for a while, or slow, raises an
error, or exits, once in 10, 30 or 100 steps on average. All contenders meet the same failures: when the run reaches a
step for the first time, a rank is hit. A failure of a rank that has no process at that time hits nobody.

* ddp, ddp-commrt: DDP over Gloo and over commrt. torchrun's agent starts all ranks again, from a checkpoint.
* backup1, backup2: `BackupWorkers`. Another process takes the place of each that ended.
* gossip, local: `Gossip()` and `LocalSGD`. The others go on without the process that ended.
* ddp-reconfigure, ddp-reconfigure-gloo: DDP over commrt and over Gloo, as in ``examples/ddp_survives.py``. The others
  go on without the process that ended, and take another one in. Needs torch 2.14.
* torchft, torchft-stable: the same with torchft-nightly, and with torchft's releases.

Processes start forked from one that has imported torch and commrt, for all contenders. The command exits with 1 if a
run does not end, if processes end with different weights, or if backup workers lose an update, or make one twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import isinf, isnan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse, which prints several lines per step
from failures_audit import Row, row_of
from failures_runs import KINDS, checkpoint_interval, draw, run
from failures_worker import RECONFIGURED, TORCHFT, Job, fresh, prepare_images, save_state
from records import Record, append, provenance, read

HERE = Path(__file__).parent
NAMES = {
    "ddp": "DDP over Gloo, checkpoints",
    "ddp-commrt": "DDP over commrt, checkpoints",
    "backup1": "`BackupWorkers(1)`, replacement",
    "backup2": "`BackupWorkers(2)`, replacement",
    "gossip": "`Gossip()`, without the dead",
    "local": "`LocalSGD(4, delay=1)`, without the dead",
    "torchft": "torchft-nightly over Gloo, replacement",
    "ddp-reconfigure": "DDP over commrt, reconfigured",
    "ddp-reconfigure-gloo": "DDP over Gloo, reconfigured",
    "torchft-stable": "torchft 0.2.0 over Gloo, replacement",
}
COUNTS = ("updates_lost", "samples_twice", "samples_never", "restarted", "replaced", "hit", "failures")
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
    rows = list(measure(options))
    about = {"steps": options.steps, "ranks": options.ranks, "compute_s": options.compute_ms / 1e3}
    records = list(records_of(rows, **about))
    append(options.records, records)
    print(tables(records))
    wrong = sum(len(row["complaints"]) for row in rows)
    print(f"{len(rows)} runs, {wrong} complaints, in {perf_counter() - begin_s:.0f} s", file=sys.stderr)
    sys.exit(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="updates of a run")
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 30, 10], help="mean steps between failures")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds: of the weights, images and failures")
    parser.add_argument("--contenders", nargs="*", default=[*NAMES], choices=NAMES)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--compute-ms", type=float, default=50.0, help="sleep of a step, as if a GPU were busy")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="the failures that happen")
    parser.add_argument("--records", type=Path, help="append records to this file")
    parser.add_argument("--table", type=Path, help="only print the tables of these records, and draw their picture")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of all runs. The contenders take turns within each seed and rate."""
    lacking = {name: why for name in options.contenders if (why := _lacks(name))}
    contenders = [name for name in options.contenders if name not in lacking]
    for name, why in lacking.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        prepare_images(Path(root))
        checkpoint_s, step_s = _checkpoint_s(Path(root)), options.compute_ms / 1e3
        for seed in range(options.seeds):
            for every in (None, *options.rates):
                interval = checkpoint_interval(checkpoint_s, step_s, every)
                for contender in contenders:
                    row = one(Path(root), contender, every, seed, options, interval)
                    if (contender, every) == ("ddp", None):
                        step_s = row["seconds"] / options.steps
                    print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)
                    yield row


def _lacks(contender: str) -> str:
    """Return what a contender needs and this machine has not, in words."""
    if contender in RECONFIGURED and not hasattr(dist, "_reconfigure"):
        return f"it needs torch 2.14 or later, and this is {torch.__version__}"
    if contender in TORCHFT and not _version(TORCHFT[contender]):
        return f"{TORCHFT[contender]} is not installed (there are wheels for Linux, x86_64)"
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def one(root: Path, contender: str, every: int | None, seed: int, options: argparse.Namespace, interval: int) -> Row:
    """Run a contender once, and return its figures."""
    folder = root / f"{contender}-{every}-{seed}"
    folder.mkdir()
    (folder / "images.pt").symlink_to(root / "images.pt")
    job = Job(contender, str(folder), options.ranks, options.steps, options.compute_ms / 1e3, seed, interval)
    limit_s = LIMIT_S + 10 * job.steps * job.compute_s
    failures = draw(seed, every, job.steps, job.ranks, options.kinds)
    row = row_of(run(job, failures, limit_s), every)
    shutil.rmtree(folder)
    return row


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


def records_of(rows: Sequence[Row], **about: Any) -> Iterator[Record]:
    """Yield a record for each contender and rate: medians over the seeds, with the lowest and the highest ratio."""
    for every in sorted({row["every"] for row in rows}, key=lambda rate: -(rate or 1e9)):
        for name in dict.fromkeys(row["contender"] for row in rows):
            mine = [row for row in rows if (row["contender"], row["every"]) == (name, every)]
            if mine:
                yield {
                    "suite": "failures",
                    "case": f"a failure every {every} steps" if every else "without failures",
                    "variant": name,
                    "every": every,
                    "seeds": len(mine),
                    "median_s": median(row["seconds"] for row in mine),
                    **_ratios(mine, rows, name, "ratio"),
                    **_ratios(mine, rows, "ddp", "ratio_to_ddp"),
                    **_middle(mine, "loss"),
                    **{key: median(row[key] for row in mine) for key in COUNTS},
                    "errors": sum(len(row["errors"]) for row in mine),
                    "complaints": sum(len(row["complaints"]) for row in mine),
                    "joins_s": median([row["join_s"] for row in mine if row["join_s"] is not None] or [0.0]),
                    **about,
                    **provenance(),
                    **{package: _version(package) for package in [TORCHFT.get(name)] if package},
                }


def _ratios(mine: Sequence[Row], rows: Sequence[Row], peer: str, key: str) -> dict[str, float]:
    """Return the times over the median of those of `peer` without failures."""
    calm = [row["seconds"] for row in rows if row["contender"] == peer and row["every"] is None]
    return _middle([{key: row["seconds"] / median(calm)} for row in mine], key) if calm else {}


def _middle(rows: Sequence[Row], key: str) -> dict[str, float]:
    found = [row[key] for row in rows if not isnan(row[key])]  # a run without an end has no loss
    return {key: median(found), f"{key}_low": min(found), f"{key}_high": max(found)}


def tables(records: Sequence[Record]) -> str:
    """Return the table of times, and that of what the most frequent failures cost."""
    found = {(one["variant"], one["every"]): one for one in records}
    names = list(dict.fromkeys(one["variant"] for one in records))
    rates = [rate for rate in dict.fromkeys(one["every"] for one in records) if rate]
    lines = _row("", "s without failures", *(f"every {rate} steps" for rate in rates), is_head=True)
    for name in names:
        calm = found.get((name, None))
        cells = [
            f"{calm['median_s']:.1f}" if calm else "",
            *(_spread(found.get((name, rate)), "ratio") for rate in rates),
        ]
        lines += _row(NAMES[name], *cells)
    if rates:
        worst = [found[name, min(rates)] for name in names if (name, min(rates)) in found]
        lines += ["", *_costs(worst, {name: found.get((name, None)) for name in names})]
    return "\n".join(lines)


def _costs(worst: Sequence[Record], calm: dict[str, Record | None]) -> Iterator[str]:
    """Yield the lines of a table of what is lost."""
    heads = ["of DDP's time", "updates lost", "samples twice", "never", "loss", "without failures"]
    yield from _row(worst[0]["case"], *heads, "restarts", "replaced", "hit", is_head=True)
    for one in worst:
        lost, twice, never, *ends = (f"{one[key]:g}" for key in COUNTS[:6])
        of_ddp = f"{one['ratio_to_ddp']:.2f}" if "ratio_to_ddp" in one else ""
        losses = _spread(one, "loss"), _spread(calm[one["variant"]], "loss")
        yield from _row(NAMES[one["variant"]], of_ddp, lost, twice, never, *losses, *ends)


def _row(*cells: str, is_head: bool = False) -> list[str]:
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |")]
    return [*lines, "|---" * len(cells) + "|"] if is_head else lines


def _spread(one: Record | None, key: str) -> str:
    if one is None or key not in one:
        return ""
    return f"{one[key]:.2f} ({one[f'{key}_low']:.2f} .. {one[f'{key}_high']:.2f})"


def draw_picture(records: Sequence[Record], path: Path) -> None:
    """Draw the ratios of all contenders, by rate."""
    from matplotlib import rcParams  # noqa: PLC0415  # heavy
    from matplotlib.figure import Figure  # noqa: PLC0415

    rcParams["svg.hashsalt"] = "failures"  # the same records make the same bytes
    rates = [rate for rate in dict.fromkeys(one["every"] for one in records) if rate]
    names = list(dict.fromkeys(one["variant"] for one in records))
    figure = Figure(figsize=(3.7, 0.8 + 0.56 * len(names)), layout="constrained")  # legible on a telephone
    axes = figure.subplots()
    calmest = sorted(names, key=lambda name: [one["ratio"] for one in records if one["variant"] == name][-1])
    for number, rate in enumerate(rates):
        mine = [one for one in records if one["every"] == rate and "ratio" in one]
        places = [calmest.index(one["variant"]) + 0.2 * number for one in mine]
        widths = [one["ratio"] for one in mine]
        spread = [
            [one["ratio"] - one["ratio_low"] for one in mine],
            [0.0 if isinf(one["ratio_high"]) else one["ratio_high"] - one["ratio"] for one in mine],
        ]
        colour = ("#c6dbef", "#6baed6", "#2171b5")[number % 3]
        axes.barh(places, widths, xerr=spread, height=0.18, color=colour, label=str(rate), error_kw={"lw": 1})
        for place, one in zip(places, mine, strict=True):
            end = one["ratio"] if isinf(one["ratio_high"]) else one["ratio_high"]
            axes.text(end + 0.03, place, f"{one['ratio']:.2f}", fontsize=9, va="center")
    for number, name in enumerate(calmest):
        axes.text(0, number - 0.14, NAMES[name].replace("`", ""), fontsize=11, va="bottom")
        axes.plot([1.0, 1.0], [number - 0.12, number + 0.52], color="0.3", lw=0.8)
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.4, -0.5)
    legend = {"title": "steps from one failure to the next", "title_fontsize": 11, "fontsize": 11, "ncols": 3}
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), frameon=False, **legend)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_xticks([])
    figure.suptitle("time of 100 steps over that without failures", fontsize=11)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
