# SPDX-License-Identifier: Apache-2.0
"""Where does the time go after a failure? ``python tests/audits/recovery.py --runs 20``.

The job is that of ``bench/failures.py``: five processes train a CNN over shared memory, or over Gloo. Rows, each the
median over all failures of a run, with the 20th and 80th percentile:

* A rank whose gradient counts is killed before it sends it (`BackupWorkers(1)`). Since its death: until the last of
  the others has noticed it, is in the next generation, has connections again, and has made the update.
* A process that takes its place: from its start (torch is imported) until it is a member, and until its gradient
  counts; and the longest time between two updates of the others meanwhile.
* A rank is killed while another one is stopped (`BackupWorkers(2)`): until the next update.
* A rank of DDP is killed, and torchrun starts all again from a checkpoint: until the next update. With torch 2.14 or
  later, the same where the others reconfigure the group.

All processes are of one machine, and read one clock.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from failures_runs import Failure, Job, Run, run
from failures_worker import prepare_images

RANKS, STEP_S, EVERY = 5, 0.05, 30
"""Processes, seconds that a step computes, and steps between two failures."""
STOPPED_S, LIMIT_S = 1.5, 300.0
STAGES = {"leaves": "noticed", "formed": "in the next generation", "connected": "connected"}
Rows = dict[str, list[float]]
Event = dict[str, Any]


def main() -> None:
    """Run all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="failures of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        prepare_images(Path(root))
        rows = {
            f"{name}, {transport}": row
            for transport in ("shared", "gloo")
            for name, row in _rows(Path(root), transport, given.runs)
        }
    for name, row in rows.items():
        low, middle, high = np.quantile(row, (0.2, 0.5, 0.8))
        print(f"{name:72} {middle:.3f} ({low:.3f}..{high:.3f}) s, {len(row)} times")


def _rows(root: Path, transport: str, runs: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the name and the seconds of each row."""
    rng = Random(f"{runs}")
    kills = [Failure(EVERY * (k + 1), rng.random(), rng.randrange(RANKS), "kill", 0.0) for k in range(runs)]
    sending = [replace(each, kind="sending") for each in kills]
    stopped = [replace(each, victim=(each.victim + 1) % RANKS, kind="stop", lasts_s=STOPPED_S) for each in kills]
    found = _run(root, "backup1", transport, sending)
    for stage, row in after_deaths(found.events).items():
        yield f"killed before it sends, until the others {stage}", row
    for stage, row in joins(found.events).items():
        yield f"a new process, {stage}", row
    both = [each for pair in zip(stopped, kills, strict=True) for each in pair]
    beside = _run(root, "backup2", transport, both)
    yield "killed beside a stopped rank, until the next update", until_next_updates(beside)
    again = _run(root, "ddp-commrt", transport, kills)
    yield "torchrun starts all again, until the next update", until_next_updates(again)
    if hasattr(dist, "_reconfigure"):
        beside = _run(root, "ddp-reconfigure", transport, kills)
        yield "the others reconfigure the group, until the next update", until_next_updates(beside)
    if transport == "gloo":
        yield "the same of DDP over Gloo", until_next_updates(_run(root, "ddp", transport, kills))


def _run(root: Path, contender: str, transport: str, failures: Sequence[Failure]) -> Run:
    folder = root / f"{contender}-{transport}"
    folder.mkdir()
    (folder / "images.pt").symlink_to(root / "images.pt")
    steps = failures[-1].step + 2 * EVERY
    found = run(Job(contender, str(folder), RANKS, steps, STEP_S, 0, 1, transport=transport), failures, LIMIT_S)
    if found.trouble:
        raise SystemExit(f"{contender} over {transport}: {found.trouble}")
    return found


def after_deaths(events: Sequence[Event]) -> Rows:
    """Return by stage how long after each death the last of the others was there."""
    deaths = [event for event in events if event["kind"] == "dies"]
    rows: Rows = {name: [] for name in (*STAGES.values(), "have the next update")}
    for death in deaths:
        same_start = (event for event in events if event["attempt"] == death["attempt"])
        after = [event for event in same_start if event["at_s"] > death["at_s"]]
        ready_s = next((event["at_s"] for event in after if event["kind"] == "connected"), inf)
        updates = (event["at_s"] for event in after if event["kind"] == "update")
        done_s = next((at_s for at_s in updates if at_s > ready_s), None)
        if done_s is None:  # the death of one more than there are backups: all started again
            continue
        for kind, name in STAGES.items():
            times = (event["at_s"] for event in after if event["kind"] == kind and event["at_s"] < done_s)
            if (last_s := max(times, default=None)) is not None:  # else another failure called them before
                rows[name].append(last_s - death["at_s"])
        rows["have the next update"].append(done_s - death["at_s"])
    return rows


def joins(events: Sequence[Event]) -> Rows:
    """Return how long new processes took, and the longest time between two updates of the others meanwhile."""
    rows: Rows = {"from its start until it is a member": [], "from its start until its gradient counts": []}
    meanwhile = rows["longest time between updates meanwhile"] = []
    updates = [event for event in events if event["kind"] == "update"]
    first = {event["rank"]: event["pid"] for event in reversed(events) if event["kind"] == "start"}
    for start in (event for event in events if event["kind"] == "start" and first[event["rank"]] != event["pid"]):
        own = [event for event in events if event["pid"] == start["pid"]]
        ready_s = next((event["at_s"] for event in own if event["kind"] == "ready"), None)
        counted_s = next((event["at_s"] for event in own if event["kind"] == "update"), None)
        if ready_s is not None and counted_s is not None:
            rows["from its start until it is a member"].append(ready_s - start["at_s"])
            rows["from its start until its gradient counts"].append(counted_s - start["at_s"])
            times = [event["at_s"] for event in updates if start["at_s"] < event["at_s"] < counted_s]
            meanwhile.append(max((b - a for a, b in pairwise([start["at_s"], *times, counted_s])), default=0.0))
    return rows


def until_next_updates(found: Run) -> list[float]:
    """Return for each killed process how long after its death the next update came."""
    updates = [(event["at_s"], event["step"]) for event in found.events if event["kind"] == "update"]
    rows = []
    for death_s in (each["at_s"] for each in found.struck if each["kind"] == "kill" and each["hit"]):
        latest = max((step for at_s, step in updates if at_s <= death_s), default=-1)  # others may note it later
        rows.append(min(at_s for at_s, step in updates if at_s > death_s and step != latest) - death_s)
    return rows


if __name__ == "__main__":
    main()
