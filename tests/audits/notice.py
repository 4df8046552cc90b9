# SPDX-License-Identifier: Apache-2.0
"""How soon do ranks notice that one of them is lost? ``python tests/audits/notice.py --runs 20``.

Four processes sum a tensor again and again (`world.all_reduce`, a ring), and one of them is killed or stopped at a
random instant. **Timed**: from that signal until the last of the other three raises its error. `connection` is the part
of it until the last of them has noticed: the rest is the search for what the lost rank reported, which the error says.
All processes are of one machine, and read one clock.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from random import Random
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

import commrt
from commrt.errors import DeadlineExceeded, PeerLost
from commrt.testing.processes import run_processes

RANKS, NUMEL, TIMEOUT_S = 4, 1 << 16, 3.0


class Case(NamedTuple):
    """What happens to one rank, and what those raise that wait for it; then the others lose these."""

    name: str
    transport: str
    signal: signal.Signals
    error: type[Exception]


CASES = (
    Case("killed, shared memory", "shared", signal.SIGKILL, PeerLost),
    Case("killed, gloo", "gloo", signal.SIGKILL, PeerLost),
    Case("stopped, shared memory", "shared", signal.SIGSTOP, DeadlineExceeded),
    Case("stopped, gloo", "gloo", signal.SIGSTOP, DeadlineExceeded),
)


def sums_until_lost(tell: Callable[[str], None], timeout_s: float, transport: str) -> tuple[str, float, float]:
    """Sum until another rank is lost; return the kind of the error, and when this rank noticed and raised it."""
    os.environ["COMMRT_TRANSPORT"] = transport
    torch.set_num_threads(1)
    world, row, noticed_s = commrt.init(timeout_s, start_timeout_s=60.0), torch.ones(NUMEL), list[float]()
    world.all_reduce(row, algorithm=commrt.Ring())
    abort = world.transport.abort

    def abort_and_note() -> None:
        noticed_s.append(monotonic())
        abort()

    world.transport.abort = abort_and_note  # the first that a failing rank does after it has left its report
    tell("began")
    try:
        while True:
            world.all_reduce(row, algorithm=commrt.Ring())
    except (PeerLost, DeadlineExceeded) as error:
        return type(error).__name__, noticed_s[0], monotonic()


def noticed_s(case: Case, seed: int) -> tuple[float, float]:
    """Return how many seconds after the signal the last rank noticed, and raised its error."""
    rng, began, struck_s = Random(f"{case.name} {seed}"), Counter[int](), list[float]()
    victim, after_s, processes = rng.randrange(RANKS), rng.uniform(0.0, 0.2), dict[int, BaseProcess]()

    def strike() -> None:
        Event().wait(after_s)
        struck_s.append(monotonic())
        os.kill(processes[victim].pid or 0, case.signal)

    def on_message(rank: int, _: Any, process: BaseProcess) -> bool:
        began[rank], processes[rank] = 1, process
        if len(began) == RANKS:
            Thread(target=strike, daemon=True).start()
        return rank == victim

    ends = run_processes(
        RANKS, sums_until_lost, TIMEOUT_S, case.transport, limit_s=60.0, on_message=on_message, holds_store=True
    )
    others = [end for end in ends if end.rank != victim]
    kinds = [end.value[0] if end.value else end.error for end in others]
    if case.error.__name__ not in kinds or not {*kinds} <= {PeerLost.__name__, case.error.__name__}:
        raise SystemExit(f"{case.name}, seed {seed}: expected {case.error.__name__}, got {kinds}")
    _, seen_s, raised_s = zip(*(end.value for end in others), strict=True)
    return max(seen_s) - struck_s[0], max(raised_s) - struck_s[0]


def main() -> None:
    """Take turns between the cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each case")
    given = parser.parse_args()
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in CASES}
    for seed in range(given.runs):
        for case in CASES:
            times[case].append(noticed_s(case, seed))
    print(f"{RANKS} ranks, timeout {TIMEOUT_S:g} s, {given.runs} runs: median (20 %..80 %) in s")
    print(f"{'one rank is':26} {'noticed by the last of the others':34} raised by it")
    for case, pairs in times.items():
        columns = np.quantile(pairs, (0.2, 0.5, 0.8), axis=0).T
        cells = [f"{middle:.3f} ({low:.3f}..{high:.3f})" for low, middle, high in columns]
        print(f"{case.name:26} {cells[0]:34} {cells[1]}")


if __name__ == "__main__":
    main()
