# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of jitter: ``python studies/gossip/gossip_jitter.py``.

Each worker sleeps instead of computing: a random time in each step, log-normal around a mean. Efficiency is that mean
over the time of a step. An all-reduce waits for the slowest rank, gossip for one partner, and late gossip for almost no
rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import log
from statistics import mean, stdev
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch import nn

import commrt
from commrt import Algorithm
from commrt.testing.processes import run_processes

__all__ = ["MODES", "efficiency"]

MODES: dict[str, Algorithm] = {
    "all-reduce": commrt.Ring(),
    "gossip": commrt.Gossip(),
    "gossip, one step late": commrt.Gossip(staleness=1),
}
WARM_STEPS = 5


def work(_: Callable[[Any], None], mode: str, steps: int, mean_s: float, variation: float, seed: int) -> list[float]:
    """Train on one rank; return the seconds that it slept, and those that all took."""
    torch.set_num_threads(1)
    with commrt.init(60.0, start_timeout_s=120.0) as world:
        model = nn.Linear(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = commrt.attach(model, optimizer, MODES[mode], world=world)
        spread = log(1 + variation**2)
        rng = np.random.default_rng([seed, world.rank])
        times = mean_s * rng.lognormal(-spread / 2, spread**0.5, WARM_STEPS + steps)
        for number, seconds in enumerate(times):
            if number == WARM_STEPS:
                begin_s = perf_counter()
            optimizer.zero_grad()
            loss = model(torch.ones(1, 32)).sum()
            sleep(seconds)  # after the forward pass, which waits for messages
            loss.backward()
            optimizer.step()
        elapsed_s = perf_counter() - begin_s
        replica.drain()
        world.agree("all are done")
        return [float(times[WARM_STEPS:].sum()), elapsed_s]


def efficiency(mode: str, workers: int, steps: int, mean_s: float, variation: float, seed: int) -> float:
    """Return time slept over time taken, of all workers."""
    outcomes = run_processes(workers, work, mode, steps, mean_s, variation, seed, limit_s=60 + 10 * steps * mean_s)
    if any(outcome.value is None for outcome in outcomes):
        raise RuntimeError(next(str(outcome.error) for outcome in outcomes if outcome.value is None))
    slept, taken = (sum(outcome.value[i] for outcome in outcomes) for i in (0, 1))
    return slept / taken


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8, help="number of workers")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--mean-s", type=float, default=0.15, help="mean seconds of a step")
    parser.add_argument("--variation", type=float, default=0.1, help="standard deviation over mean")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in range(options.seeds):
        for mode, values in found.items():
            values.append(efficiency(mode, options.workers, options.steps, options.mean_s, options.variation, seed))
    if options.json:
        print(json.dumps(found))
    else:
        for mode, values in found.items():
            spread = stdev(values) if len(values) > 1 else 0.0
            print(f"{mode:<24} {mean(values):.1%} +- {spread:.1%}")


if __name__ == "__main__":
    main()
