# SPDX-License-Identifier: Apache-2.0
"""Measure how much of an exchange local SGD hides: ``sudo python studies/local_sgd/local_on_slow_links.py``.

Needs Linux, iproute2 and root. The network is that of ``bench/netlab.py``: hosts are namespaces whose links carry
200 Mbit/s each way. It prints

* steps that compute by sleeping, and how much of a step each rank waits for others (the mean of the ranks, and the
  rank that waits most); a step that computes for longer hides more of an exchange,
* steps of ``examples/mnist/train.py``, beside those of DDP with the same batches. Processes share this machine's
  cores: the variant without an exchange shows what computing takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

import commrt
from commrt import Algorithm

sys.path.append(str(Path(__file__).parents[2] / "bench"))  # the lab of namespaces

from network_hosts import Cabling, cluster, missing, output_of_first
from sleeping_steps import Training

__all__ = ["exposed", "main", "trained"]

DEMO = Path(__file__).parent.parent / "examples" / "mnist" / "train.py"
PERIOD, DELAY = 16, 2
TRAINED = {
    "ddp": ["--algorithm", "ddp"],
    "local": ["--algorithm", "local", "--period", str(PERIOD)],
    "local, delay 2": ["--algorithm", "local", "--period", str(PERIOD), "--delay", str(DELAY)],
    "no exchange": ["--algorithm", "local", "--period", "100000"],
}


def algorithms(hosts: int, per_host: int) -> dict[str, Algorithm]:
    """Return the algorithms, by name."""
    torus = commrt.Torus2D((per_host, hosts))
    return {
        "torus2d": torus,
        f"local, period {PERIOD}": commrt.LocalSGD(PERIOD, inner=torus),
        f"local, period {PERIOD}, delay {DELAY}": commrt.LocalSGD(PERIOD, DELAY, inner=torus),
    }


def exposed(options: argparse.Namespace) -> None:
    """Measure steps on one rank; rank 0 prints for each algorithm and rank the seconds of a step and those exposed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[tuple[float, float]]] = {}
    with commrt.init(300.0) as world:
        ways = algorithms(options.hosts, options.per_host).items()
        for (name, algorithm), compute_s in product(ways, options.compute_s):
            own = _steady(Training(world, algorithm, options.numel, compute_s), options.periods * PERIOD)
            gathered: list[Any] = [None] * world.size
            dist.all_gather_object(gathered, own)
            found[f"{name}, {compute_s:g} s of computing"] = gathered
        if world.rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _steady(training: Training, steps: int) -> tuple[float, float]:
    """Return the seconds of a step and those exposed, from a step on in which an average is in flight."""
    training.train(PERIOD + 1)
    before = training.replica.stats().exposed_s
    step_s = training.train(steps)
    exposed_s = (training.replica.stats().exposed_s - before) / steps
    training.seconds(PERIOD)  # checks the weights
    training.replica.detach()
    return step_s, exposed_s


def trained(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step of ``examples/mnist``, for each round of each variant, interleaved."""
    os.environ["PYTHONSAFEPATH"] = ""  # the program finds the modules beside it
    found: dict[str, list[float]] = {name: [] for name in TRAINED}
    for _ in range(options.rounds):
        for name, arguments in TRAINED.items():
            command = [str(DEMO), *arguments, "--epochs", "2", "--batch-size", "64", "--json"]
            found[name].append(json.loads(output_of_first(command, options.hosts, options.per_host))["step_seconds"])
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts")
    parser.add_argument("--per-host", type=int, default=2, help="ranks per host")
    parser.add_argument("--rate", type=float, default=200.0, help="rate of each link, in Mbit/s each way")
    parser.add_argument("--numel", type=int, default=3_200_000, help="parameters of the model that sleeps")
    parser.add_argument("--compute-s", type=float, nargs="+", default=[0.3, 0.5], help="seconds of computing in a step")
    parser.add_argument("--periods", type=int, default=3, help="periods to measure")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of examples/mnist")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        exposed(options)
        return
    if why := missing():
        sys.exit(f"nothing was measured: {why}")
    with cluster(Cabling(options.hosts, options.rate)):
        _show_exposed(options)
        _show_trained(trained(options))


def _show_exposed(options: argparse.Namespace) -> None:
    printed = output_of_first([__file__, "--work", *sys.argv[1:]], options.hosts, options.per_host)
    for name, ranks in json.loads(printed).items():
        step_s = mean(step_s for step_s, _ in ranks)
        shares = [exposed_s / own_s for own_s, exposed_s in ranks]
        print(f"{name:48} step {step_s:.3f} s, exposed {mean(shares):.1%}, at most {max(shares):.1%}", flush=True)


def _show_trained(times: dict[str, list[float]]) -> None:
    for name, found in times.items():
        ratios = sorted(own / peer for own, peer in zip(found, times["ddp"], strict=True))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) of ddp"
        print(f"examples/mnist, {name:16} step {median(found):.3f} s, {spread}", flush=True)


if __name__ == "__main__":
    main()
