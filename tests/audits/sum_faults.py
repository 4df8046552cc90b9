# SPDX-License-Identifier: Apache-2.0
"""Kill or stop a rank at some instant of a sum over all ranks: ``python tests/audits/sum_faults.py``.

With gossip and with backup workers, the ranks that are left repeat the sum. It must be the sum over all ranks, or over
those that are left, and the same on each of them. A rank that was stopped gets an error, or the same sum.
"""

import argparse
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from threading import Timer
from time import perf_counter
from typing import Any

import torch
from torch import nn

import commrt
from commrt.schedule import Algorithm
from commrt.testing.processes import run_processes

RANKS, VICTIM, TIMEOUT_S, STOP_S = 4, 2, 2.0, 5.0
LAST = 1.2
"""Faults fall between the start of a sum and this multiple of its duration."""
WAYS: dict[str, Algorithm] = {"backup workers": commrt.BackupWorkers(1), "gossip": commrt.Gossip()}


def summed(tell: Callable[[Any], None], algorithm: Algorithm, numel: int) -> tuple[str, list[float]]:
    """Sum ones; return how that ended and the sums. The victim first sends how long a sum takes."""
    torch.set_num_threads(1)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = commrt.init(TIMEOUT_S, start_timeout_s=60)
    commrt.attach(model, optimizer, algorithm, world=world)
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
    total = torch.ones(numel)
    for _ in range(2):  # the first one also compares the calls of the ranks
        begin_s = perf_counter()
        world.all_reduce(total.fill_(1), "sum")
        lasts_s = perf_counter() - begin_s
    total.fill_(1)
    if world.rank == VICTIM:
        tell(lasts_s)
    said = "through"
    try:
        world.all_reduce(total, "sum")
    except commrt.CommrtError as error:
        said = type(error).__name__
    with suppress(commrt.CommrtError):
        world.close()
    return said, total.unique().tolist()


def run_with_faults(algorithm: Algorithm, fault: str, share: float, numel: int) -> str:
    """Run once; return how many ranks the sum is of, or what is wrong."""

    def strike(_: int, lasts_s: float, process: BaseProcess) -> None:
        assert process.pid is not None
        first = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        Timer(lasts_s * share, os.kill, (process.pid, first)).start()
        if fault == "stop":
            Timer(lasts_s * share + STOP_S, os.kill, (process.pid, signal.SIGCONT)).start()

    ends = run_processes(RANKS, summed, algorithm, numel, limit_s=90, on_message=strike)
    others = {
        (end.value[0], *end.value[1]) if end.value else (end.error or "gone",) for end in ends if end.rank != VICTIM
    }
    if len(others) > 1:
        return f"differs: {sorted(map(str, others))}"
    own, (found,) = ends[VICTIM].value, others
    if found not in {("through", 3.0), ("through", 4.0)}:
        return f"wrong: {found}"
    if own is not None and own[0] == "through" and own[1] != [found[1]]:
        return f"wrong for who came back: {own}"
    return f"of {found[1]:g}"


def main() -> None:
    """Run each case `--runs` times, at instants spread over a sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=12, help="runs of each case")
    parser.add_argument("--numel", type=int, default=4_000_000, help="elements of the buffer")
    options = parser.parse_args()
    for way, algorithm in WAYS.items():
        for fault in ("kill", "stop"):
            shares = [LAST * (number + 0.5) / options.runs for number in range(options.runs)]
            found = Counter(run_with_faults(algorithm, fault, share, options.numel) for share in shares)
            print(json.dumps({"way": way, "fault": fault, "runs": options.runs, "sums": dict(sorted(found.items()))}))


if __name__ == "__main__":
    main()
