# SPDX-License-Identifier: Apache-2.0
"""How soon do ranks notice that one of them is lost? ``python bench/notice.py --runs 20``.

Four processes sum a tensor again and again (`world.all_reduce`, a ring), and one of them is killed or stopped at a
random instant. **Timed**: from that signal until the last of the other three raises its error. `connection` is the part
of it until the last of them has noticed: the rest is the search for what the lost rank reported, which the error says.
All processes are of one machine, and read one clock.
"""

import argparse
import os
import signal
from collections import defaultdict
from itertools import product
from random import Random
from threading import Timer
from time import monotonic

import numpy as np
import torch

import commrt
from commrt.errors import DeadlineExceeded, PeerLost
from commrt.testing.processes import run_processes

RANKS, NUMEL, TIMEOUT_S = 4, 1 << 16, 3.0


LOSSES = {"killed": (signal.SIGKILL, PeerLost), "stopped": (signal.SIGSTOP, DeadlineExceeded)}
"""What happens to one rank, and what those raise that wait for it; then the others lose these."""
TRANSPORTS = {"shared memory": "shared", "gloo": "gloo"}


def sums_until_lost(tell, transport):
    """Sum until another rank is lost; return the kind of the error, and when this rank noticed and raised it."""
    os.environ["COMMRT_TRANSPORT"] = transport
    torch.set_num_threads(1)
    world = commrt.init(TIMEOUT_S, start_timeout_s=60.0)
    row, noticed_s = torch.ones(NUMEL), []
    world.all_reduce(row, algorithm=commrt.Ring())
    abort = world.transport.abort

    def abort_and_note():
        noticed_s.append(monotonic())
        abort()

    world.transport.abort = abort_and_note  # the first that a failing rank does after it has left its report
    tell("began")
    try:
        while True:
            world.all_reduce(row, algorithm=commrt.Ring())
    except (PeerLost, DeadlineExceeded) as error:
        return type(error).__name__, noticed_s[0], monotonic()


def seconds_after(loss, transport, rng):
    """Return how many seconds after the signal the last rank noticed, and raised its error."""
    number, expected = LOSSES[loss]
    victim, processes, struck_s = rng.randrange(RANKS), {}, []

    def strike():
        struck_s.append(monotonic())
        os.kill(processes[victim].pid, number)

    def on_message(rank, _, process):
        processes[rank] = process
        if len(processes) == RANKS:
            Timer(rng.uniform(0.0, 0.2), strike).start()
        return rank == victim

    ends = run_processes(RANKS, sums_until_lost, transport, limit_s=60.0, on_message=on_message, holds_store=True)
    others = [end for end in ends if end.rank != victim]
    kinds = [end.value[0] if end.value else end.error for end in others]
    if expected.__name__ not in kinds or not {*kinds} <= {PeerLost.__name__, expected.__name__}:
        raise SystemExit(f"{loss}, {transport}: expected {expected.__name__}, got {kinds}")
    _, seen_s, raised_s = zip(*(end.value for end in others), strict=True)
    return max(seen_s) - struck_s[0], max(raised_s) - struck_s[0]


def main():
    """Take turns between the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each case")
    runs, rng, times = parser.parse_args().runs, Random(0), defaultdict(list)
    for _ in range(runs):
        for loss, (name, transport) in product(LOSSES, TRANSPORTS.items()):
            times[f"{loss}, {name}"].append(seconds_after(loss, transport, rng))
    print(f"{RANKS} ranks, timeout {TIMEOUT_S:g} s, {runs} runs: median (20 %..80 %) in s")
    print(f"{'one rank is':26} {'noticed by the last of the others':34} raised by it")
    for case, pairs in times.items():
        columns = np.quantile(pairs, (0.2, 0.5, 0.8), axis=0).T
        cells = [f"{middle:.3f} ({low:.3f}..{high:.3f})" for low, middle, high in columns]
        print(f"{case:26} {cells[0]:34} {cells[1]}")


if __name__ == "__main__":
    main()
