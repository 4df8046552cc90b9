# SPDX-License-Identifier: Apache-2.0
"""Count the calls of functions that commrt makes where nothing moves; the table of them on the page.

A count depends on no machine, but for a percent where threads wait for each other. It grows with what is done per
gradient, which a walk does not. ``python tests/support/host_calls.py`` writes the table to docs/architecture.md, with
times of ``bench/host_times.py``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch.distributed import HashStore
from walks import ROOT, TRIES, write

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))

from host_times import RUN, Loop, Mirror, NullTransport, agreed, calls, in_turns, row_of
from interleaved import spread

import commrt
from commrt.runtime.membership import ConsistencyCheck
from commrt.training import replica

BEGIN, END = "<!-- host's calls: written by tests/support/host_calls.py -->", "<!-- end of host's calls -->"
FOLDERS = tuple(f"{ROOT / name}/" for name in ("commrt", "kernels", "algorithms"))
STEADY, COUNTED, SLACK = 8, 3, 1.01
NUMEL, ROUNDS, TURN_S = 64, 40, 0.01


class Step(NamedTuple):
    """A step of training whose calls are counted."""

    transport: NullTransport
    algorithm: Callable[[], commrt.Algorithm]
    tensors: int
    buckets: int


STEPS = {
    "synchronous step, 161 gradients in 5 buckets": Step(NullTransport(0, 2), commrt.Ring, 161, 5),
    "step of gossip, 2 buckets, 8 ranks": Step(Mirror(3, 8), commrt.Gossip, 16, 2),
    "step of gossip, 2 buckets, 1,024 ranks": Step(Mirror(3, 1024), commrt.Gossip, 16, 2),
}
WORLD_RUN = "`world.run` of 256 bytes"
WORK = (WORLD_RUN, *STEPS)


def calls_of(what: str) -> int:
    """Return the calls of functions, of Python and of C, that commrt's own code made or was entered by, on average."""
    alone = mock.patch.object(replica, "_replicas", WeakValueDictionary())  # others would be asked in each step, too
    with mock.patch.object(ConsistencyCheck, "_gather", agreed), alone:
        if what == WORLD_RUN:
            with commrt.World(NullTransport(0, 2), HashStore()) as world:
                return _counted(world, calls(world, NUMEL)[RUN])
        transport, make, tensors, buckets = STEPS[what]
        with commrt.World(transport, HashStore(), transport.rank) as world:
            return _counted(world, Loop(world, make(), tensors, buckets).step)


def _counted(world: commrt.World, call: Callable[[], object]) -> int:
    for _ in range(STEADY):
        call()
    number = count()

    def note(frame, event, _) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(FOLDERS):
            next(number)

    world.comm_thread.submit(lambda: sys.setprofile(note)).result()
    sys.setprofile(note)
    try:
        for _ in range(COUNTED):
            call()
    finally:
        sys.setprofile(None)
        world.comm_thread.submit(lambda: sys.setprofile(None)).result()
    return next(number) // COUNTED


def times_us(what: str) -> str:
    """Return the CPU time on both threads in us, and in brackets its 20th and 80th percentile."""
    with mock.patch.object(ConsistencyCheck, "_gather", agreed):
        if what in STEPS:
            transport, *how = STEPS[what]
            return row_of(transport, *how)[-1]
        with commrt.World(NullTransport(0, 2), HashStore()) as world:
            run = {RUN: calls(world, NUMEL)[RUN]}
            low, middle, high = spread(in_turns(run, ROUNDS, TURN_S)[RUN])
    return f"{1e6 * middle:.1f} ({1e6 * low:.1f}, {1e6 * high:.1f})"


def written(page: str) -> dict[str, int]:
    """Return the calls in the table of the page."""
    rows = [row.strip("|").split("|") for row in page[page.index(BEGIN) : page.index(END)].splitlines()[3:]]
    return {name.strip(): int(calls.replace(",", "")) for name, calls, _ in rows}


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    gc.disable()
    most = {what: round(min(calls_of(what) for _ in range(TRIES)) * SLACK) for what in WORK}
    rows = [f"| {what} | {calls:,} | {times_us(what)} |" for what, calls in most.items()]
    write("\n".join([BEGIN, "| what | calls | us |", "|---|---|---|", *rows, END]))


if __name__ == "__main__":
    main()
