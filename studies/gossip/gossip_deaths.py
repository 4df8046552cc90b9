# SPDX-License-Identifier: Apache-2.0
"""Train by gossip on MNIST, and kill one process: ``python studies/gossip/gossip_deaths.py``.

Each rank has its own shard, random or sorted by class. A rank gets SIGKILL, and its shard is lost. The others go on,
and end equal. The pause is the longest step of a survivor: from the death to the first exchange of the survivors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gossip_learning import LR, MOMENTUM, Network, rate, spread
from torch.nn.functional import cross_entropy

import commrt
from commrt.testing.processes import run_processes

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder

from mnist_images import BATCH, load, shards

__all__ = ["RANKS", "Outcome", "trained", "work"]

RANKS, VICTIM, STEPS = 4, 3, 1120
CASES = {
    "gossip": commrt.Gossip(),
    "gossip, one step late": commrt.Gossip(staleness=1),
}


@dataclass(frozen=True)
class Outcome:
    """The results of the survivors."""

    accuracy: float
    """Accuracy of the survivors' network, on 1,000 test images."""
    median_step_ms: float
    longest_step_ms: float
    lost: list[str]
    """The lost ranks, in the words of the report."""


def work(
    tell: Callable[[Any], None], case: str, seed: int, steps: int, dies_at: int, sorted_by_class: bool
) -> tuple[float, list[float], list[str]]:
    """Train on one rank; return the accuracy, the seconds of each step, and the lost ranks."""
    torch.set_num_threads(1)
    images, test = load()
    with commrt.init(60.0, start_timeout_s=120.0) as world:
        x, y = (part[world.rank] for part in shards(images, RANKS, seed, sorted_by_class))
        model = Network(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        replica = commrt.attach(model, optimizer, CASES[case])
        order = torch.Generator().manual_seed(1000 * seed + world.rank)
        seconds = []
        for step in range(steps):
            if world.rank == VICTIM and step == dies_at:
                tell("kill me")
            begin_s = perf_counter()
            places = torch.randint(len(x), (BATCH,), generator=order)
            optimizer.param_groups[0]["lr"] = rate(step, steps)
            optimizer.zero_grad()
            cross_entropy(model(x[places]), y[places]).backward()
            optimizer.step()
            seconds.append(perf_counter() - begin_s)
        replica.consolidate()
        with torch.no_grad():
            right = model(test.pixels.flatten(1)).argmax(1) == test.digits
        return right.float().mean().item(), seconds, [str(loss) for loss in replica.lost]


def trained(case: str, seed: int, steps: int = STEPS, *, kills: bool, sorted_by_class: bool = False) -> Outcome:
    """Run once; after a third of the steps the victim is killed."""

    def on_message(_: int, __: Any, process: BaseProcess) -> bool:
        process.kill()
        return True

    dies_at = steps // 3 if kills else steps
    ends = run_processes(RANKS, work, case, seed, steps, dies_at, sorted_by_class, limit_s=300.0, on_message=on_message)
    accuracy, seconds, lost = ends[0].value
    return Outcome(accuracy, 1e3 * median(seconds), 1e3 * max(seconds[5:]), lost)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    parser.add_argument(
        "--sorted", action="store_true", help="sort shards by class, so that the dead rank's classes are lost"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        for kills in (False, True):
            found = [
                trained(case, seed, options.steps, kills=kills, sorted_by_class=options.sorted)
                for seed in range(options.seeds)
            ]
            rows.append({"case": case, "killed": kills, "runs": [asdict(outcome) for outcome in found]})
            if not options.json:
                _print(case, kills, found)
    if options.json:
        print(json.dumps(rows))


def _print(case: str, kills: bool, found: Sequence[Outcome]) -> None:
    fields = (spread(found, field) for field in ("accuracy", "median_step_ms", "longest_step_ms"))
    print(f"{case:<24}", "one of 4 killed" if kills else "nobody killed  ", *fields, sep="  ")
    for lost in {lost for outcome in found for lost in outcome.lost}:
        print(f"    {lost}")


if __name__ == "__main__":
    main()
