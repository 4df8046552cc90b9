# SPDX-License-Identifier: Apache-2.0
"""Compare predicted and measured times to a loss: ``sudo python studies/time_to_loss/target_on_slow_links.py CURVES``.

Needs Linux, iproute2 and root. CURVES is a folder of `record_curves`. The script predicts with the commands of a user:
``commrt probe`` measures the links of four hosts with two ranks each (`network_hosts`), and `plan_target` takes the
curves of 1, 2 and 4 ranks. Then all 8 ranks train, and the script takes the time in which their loss reaches the
target. A step computes a small network, and sleeps to stand for a larger one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from convergence import steps_to
from curve import Curve
from record_curves import METHODS, RATE, WARMUP
from torch.nn.functional import cross_entropy

import commrt
from commrt.algorithms.registration import Nodes
from commrt.tools.planning.planner import tried_shapes
from commrt.tools.planning.python_calls import short_name
from commrt.tools.planning.workload import FORWARD

sys.path.append(str(Path(__file__).parents[1] / "mnist"))  # as a program it finds only its own folder
sys.path.append(str(Path(__file__).parents[2] / "bench"))  # the lab of namespaces

from curve_recorder import CurveRecorder
from mnist_images import BATCH, dealt  # it also puts the demo on the path
from network_hosts import Cabling, cluster, missing, output_of_first
from small_cnn import MOMENTUM, network

__all__ = ["main", "predicted", "trained"]

HOSTS, PER_HOST = 4, 2
RANKS = HOSTS * PER_HOST
FITTED = 1, 2, 4
ALONE, MEASURED_ALONE = "alone", 20
"""Steps without an exchange show what computing takes, as the processes share this machine's cores."""


def trained(options: argparse.Namespace) -> None:
    """Train on one rank; rank 0 prints the losses of all steps, and when each has ended."""
    torch.set_num_threads(1)
    with commrt.init(300.0) as world:
        model = network(options.seed)
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        replica = commrt.attach(model, optimizer, _algorithm(options.work, options.algorithm), world=world)
        recorder, ends_s = CurveRecorder(), []
        feed = [(x[world.rank], y[world.rank]) for x, y in dealt(options.seed, options.steps, RANKS)]
        world.agree("begin")
        begin_s = perf_counter()
        for step, (pixels, digits) in enumerate(feed):
            optimizer.param_groups[0]["lr"] = RATE * RANKS * min(1.0, (step + 1) / WARMUP)
            optimizer.zero_grad()
            sleep(FORWARD * options.compute_s)
            loss = cross_entropy(model(pixels), digits)
            sleep((1 - FORWARD) * options.compute_s)
            torch.autograd.backward(loss)
            optimizer.step()
            recorder.record(loss.item())
            ends_s.append(perf_counter() - begin_s)
        replica.drain()
        lines = recorder.lines(world, options.work, BATCH * RANKS, {}, options.seed)
    if lines is not None:
        print(json.dumps([Curve.parsed(lines).losses.tolist(), ends_s]), flush=True)


def _algorithm(method: str, name: str) -> commrt.Algorithm:
    """Return the algorithm of a method, whose all-reduce is called `name`."""
    if method == ALONE:
        return commrt.LocalSGD(10**6)
    if method == "gossip":
        return commrt.Gossip()
    by_name = {short_name(each.algorithm): each.algorithm for each in tried_shapes(Nodes(RANKS, PER_HOST))}
    return by_name[name] if method == "synchronous" else commrt.LocalSGD(8, inner=by_name[name])


def predicted(options: argparse.Namespace, folder: Path, compute_s: float) -> dict[str, dict[str, Any]]:
    """Return the plans for 8 ranks, by method."""
    links = folder / "links.toml"
    output_of_first(["-m", "commrt", "probe", "--out", str(links)], HOSTS, PER_HOST)
    files = [str(path) for path in sorted(options.curves.glob("*.jsonl")) if int(path.stem.split("-")[1]) in FITTED]
    numel = sum(parameter.numel() for parameter in network(0).parameters())
    planner = str(Path(__file__).parent / "plan_target.py")
    command = [sys.executable, planner, *files, "--target-loss", str(options.target), "--ranks", str(RANKS)]
    command += ["--cluster", str(links), "--model", str(numel), "--wire", "fp32"]
    command += ["--compute-ms", str(1e3 * compute_s), "--json"]
    env = {**os.environ, "PYTHONSAFEPATH": ""}  # it finds its folder
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout  # noqa: S603  # our own program
    print(links.read_text(encoding="utf-8"))
    return {row["method"].split(",")[0]: row for row in json.loads(said)["plans"] if row["ranks"] == RANKS}


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, help="folder with curves of record_curves.py")
    parser.add_argument("--rate", type=float, default=50.0, help="rate of each link, in Mbit/s each way")
    parser.add_argument("--compute-s", type=float, default=0.06, help="seconds that a step sleeps")
    parser.add_argument("--target", type=float, default=0.3, help="loss to reach")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--algorithm", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        trained(options)
        return
    if why := missing():
        sys.exit(f"nothing was measured: {why}")
    with cluster(Cabling(HOSTS, options.rate)), TemporaryDirectory() as folder:
        _, ends_s = _run(options, ALONE, steps=MEASURED_ALONE)
        compute_s = ends_s[-1] / MEASURED_ALONE
        print(
            f"a step computes for {1e3 * compute_s:.1f} ms; {HOSTS} hosts of {PER_HOST} ranks, {options.rate:g} Mbit/s"
        )
        for method, plan in predicted(options, Path(folder), compute_s).items():
            print(_row(method, plan, [*_measured(options, method, plan["algorithm"])]), flush=True)


def _run(options: argparse.Namespace, method: str, **given: object) -> tuple[list[float], list[float]]:
    """Return losses and ends of steps of one run on all hosts."""
    arguments = [__file__, str(options.curves), "--work", method, "--compute-s", str(options.compute_s)]
    for name, value in given.items():
        arguments += [f"--{name}", str(value)]
    losses, ends_s = json.loads(output_of_first(arguments, HOSTS, PER_HOST))
    return losses, ends_s


def _measured(options: argparse.Namespace, method: str, algorithm: str) -> Iterator[tuple[int, float]]:
    """Yield steps and seconds to the target, for each seed."""
    for seed in range(options.seeds):
        losses, ends_s = _run(options, method, algorithm=algorithm, seed=seed, steps=options.steps)
        curve = Curve(method, RANKS, BATCH * RANKS, np.array(losses), METHODS[method].settings)
        steps = steps_to(curve.common_losses, options.target)
        if steps is None:
            sys.exit(f"{method} does not reach a loss of {options.target:g} in {options.steps} steps: give --steps")
        yield steps, ends_s[steps - 1]


def _row(method: str, plan: dict[str, Any], found: Sequence[tuple[int, float]]) -> str:
    steps, seconds = (mean(column) for column in zip(*found, strict=True))
    each = ", ".join(f"{own:.1f}" for _, own in found)
    step_ms = 1e3 * seconds / steps
    expected = f"{plan['steps']:.0f} steps of {1e3 * plan['step_seconds']:.1f} ms = {plan['seconds']:.1f} s"
    measured = f"{steps:.0f} steps of {step_ms:.1f} ms = {seconds:.1f} s ({each})"
    ratio = f"predicted / measured {plan['seconds'] / seconds:.2f}"
    return f"{method:12} {plan['algorithm']:24} predicted {expected}; measured {measured}; {ratio}"


if __name__ == "__main__":
    main()
