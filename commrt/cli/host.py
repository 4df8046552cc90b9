# SPDX-License-Identifier: Apache-2.0
"""What commrt needs of the host, for ``commrt doctor``: memory to share, files, processors, and a clock."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from math import inf
from pathlib import Path
from time import perf_counter

from commrt.cli.findings import Finding
from commrt.membership.launcher import Launch

__all__ = ["clock", "cpus", "files", "needed_files", "processors", "quota", "shared_memory"]

QUOTA = Path("/sys/fs/cgroup/cpu.max")
CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
FILES_ALONE, FILES_PER_PEER = 40, 6
"""Counted in ranks of 2 to 8 processes: 14 descriptors, and 4 (Gloo) or 5 (shared memory) for each peer."""
READS = 2000
SLOW_CLOCK_NS = 1000.0
"""Ten times what reading it takes where the processor's own counter is used."""


def shared_memory() -> Iterator[Finding]:
    """Make a segment, as ranks of one host do, and touch it."""
    import torch  # noqa: PLC0415  # a check of its own

    from commrt.transport.meeting import host_identity  # noqa: PLC0415
    from commrt.transport.segments import SEGMENT_NBYTES, Arena  # noqa: PLC0415

    if host_identity() is None:
        detail = "this platform lacks memfd_create or abstract sockets: ranks of one host exchange through Gloo"
        yield Finding("shared memory", "absent", detail)
        return
    try:
        Arena().allocate(1 << 12, torch.uint8).fill_(1)  # so few that torch starts no threads: a fork may follow
    except (OSError, ValueError, RuntimeError) as error:
        detail = f"a segment of {SEGMENT_NBYTES >> 20} MiB cannot be made: {error}"
        yield Finding(
            "shared memory", "problem", detail, "Raise the limits (ulimit -v, -f), or set COMMRT_TRANSPORT=gloo."
        )
        return
    detail = "anonymous files: limited by memory alone, the size of /dev/shm does not matter"
    yield Finding("shared memory", "ok", detail)


def files(launch: Launch | None) -> Iterator[Finding]:
    """How many descriptors a process may hold, and needs in this launch."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = 1 if launch is None else launch.size
    needed = needed_files(size)
    facts = {"limit": limit, "needed": needed, "ranks": size}
    if 0 <= limit < needed:
        detail = f"{limit} at most in a process, a rank of {size} needs about {needed}"
        more = (
            "in this shell" if most < 0 or most >= needed else "by the administrator: the hard limit is too low as well"
        )
        yield Finding("open files", "problem", detail, f"Raise it with ulimit -n {needed}, {more}.", facts)
        return
    shown = "as many as wanted" if limit < 0 else f"{limit:,} at most in a process"
    ranks = (limit - FILES_ALONE) // FILES_PER_PEER if limit >= 0 else inf
    yield Finding("open files", "ok", f"{shown}, enough for {ranks:,} ranks that all exchange", facts=facts)


def needed_files(ranks: int) -> int:
    """Descriptors of a rank that exchanges with all others."""
    return FILES_ALONE + FILES_PER_PEER * (ranks - 1)


def processors(launch: Launch | None, threads: int) -> Iterator[Finding]:
    """How many there are for the ranks of this host, which compute with `threads` threads each."""
    count = cpus()
    facts = {"cpus": count, "threads": threads}
    ranks = 1 if launch is None else max(launch.local_size, 1)
    if ranks > count:
        detail = f"{count} for {ranks} ranks of this host: they take turns, and what one waits for is often a processor"
        yield Finding(
            "processors", "warning", detail, f"Start {count:g} ranks here, or measure with that in mind.", facts
        )
    elif ranks > 1 and ranks * threads > count:
        detail = (
            f"{count:g} for {ranks} ranks with {threads} threads each: the lane finds no processor, and waits get long"
        )
        advice = f"Set OMP_NUM_THREADS={max(int(count // ranks), 1)}, or call torch.set_num_threads."
        yield Finding("processors", "warning", detail, advice, facts)
    else:
        yield Finding("processors", "ok", f"{count:g}, and torch computes with {threads} threads", facts=facts)


def cpus() -> float:
    """Processors that this process may use: by its affinity, and by the quota of its group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return min(allowed, quota(QUOTA.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return allowed


def quota(text: str) -> float:
    """Processors' worth of time that a control group may use.

    >>> quota("150000 100000"), quota("max 100000")
    (1.5, inf)
    """
    most, period = text.split()
    return inf if most == "max" else int(most) / int(period)


def clock() -> Iterator[Finding]:
    """What reading the time costs: waits on one host read it over and over."""
    begin_s = perf_counter()
    for _ in range(READS):
        perf_counter()
    each_ns = (perf_counter() - begin_s) / READS * 1e9
    source = CLOCK.read_text(encoding="ascii").strip() if CLOCK.exists() else "unknown"
    facts = {"read_ns": round(each_ns, 1), "source": source}
    detail = f"{source}, read in {each_ns:.0f} ns"
    if each_ns > SLOW_CLOCK_NS:
        detail += ": every wait and every range of a timeline reads it"
        yield Finding("clock", "warning", detail, "Let the kernel use tsc, if the machine's can be trusted.", facts)
    else:
        yield Finding("clock", "ok", detail, facts=facts)
