# SPDX-License-Identifier: Apache-2.0
"""Records a rank's timeline, and writes it when its process ends (``COMMRT_TRACE=DIR``).

The last rank to end leaves the whole ``trace.json`` of ranks that share a disk. On the thread that
opens the world, and the one that ends the process.
"""

from __future__ import annotations

import atexit
import socket
from pathlib import Path
from time import perf_counter, time

from commrt.errors import UsageError
from commrt.runtime.world import World
from commrt.threads.chrome_trace import chrome_trace, write_rank
from commrt.threads.recording import Timeline


def record_to(directory: str, world: World) -> None:
    """Record what `world` does, and write it to `directory` when this process ends."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"COMMRT_TRACE={directory!r:.80} is no directory to write to: {error}"
        raise UsageError(what) from error
    world.recorder = timeline = Timeline(world.rank)
    atexit.register(write_trace, Path(directory), timeline, world.rank)


def write_trace(directory: Path, timeline: Timeline, rank: int) -> None:
    """Write `timeline` of `rank` to `directory`, beside what tells its host's clock."""
    clock = {"host": socket.gethostname(), "clock_s": time() - perf_counter()}
    other = clock | {"left_out": timeline.left_out}
    write_rank(directory, chrome_trace([*timeline.events]) | {"otherData": other}, rank)
