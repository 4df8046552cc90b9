# SPDX-License-Identifier: Apache-2.0
"""A real exchange for ``commrt doctor``: two processes sum buffers along a proven schedule, which is checked."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from commrt.algorithms import ring
from commrt.cli.findings import Finding
from commrt.cli.workers import run_workers
from commrt.collective import all_reduce
from commrt.errors import CommrtError, DisagreementError, UsageError
from commrt.membership.launcher import chosen_transport
from commrt.proving.proof import prove
from commrt.runtime.opening import init
from commrt.runtime.world import World
from commrt.schedule import Schedule
from commrt.transport.meeting import host_identity

__all__ = ["Exchanged", "exchange", "measure"]

RANKS = 2
LIMIT_S = 4.0
"""For all of it, which takes a quarter of a second where nothing else runs: two processes, their store, the sums."""
SERIES = {256: 21, 64 << 10: 11, 4 << 20: 7}
"""How often each number of bytes is summed; the first time does not count."""
WAYS_OUT = {
    "shared": "Try COMMRT_TRANSPORT=gloo: if that works, something here forbids shared memory between processes.",
    "gloo": "See that nothing (a firewall, a sandbox) keeps processes of this host from connecting over 127.0.0.1.",
}


class Exchanged(NamedTuple):
    """What a rank saw."""

    transport: str
    median_s: dict[int, float]
    """Of an all-reduce, by its bytes."""
    wrong: int
    """Elements of sums that were not what they should be."""


def exchange() -> Iterator[Finding]:
    """Let two forked processes exchange over what ``init()`` would choose, whatever launched this one."""
    schedule = ring.all_reduce(RANKS)
    prove(schedule, all_reduce(RANKS, schedule.chunks))
    asked = chosen_transport() or ("gloo" if host_identity() is None else "shared")
    try:
        first, *others = run_workers(RANKS, lambda: measure(schedule), limit_s=LIMIT_S).values()
    except (UsageError, DisagreementError) as error:
        yield Finding("exchange", "problem", str(error), "The message says what to do.")
    except CommrtError as error:
        yield Finding("exchange", "problem", f"two processes could not: {error}", WAYS_OUT[asked])
    else:
        yield _judged(schedule, first, sum(each.wrong for each in (first, *others)))


def measure(schedule: Schedule) -> Exchanged:
    """In each of the processes."""
    torch.set_num_threads(1)
    with init(LIMIT_S, start_timeout_s=LIMIT_S) as world:
        seen = {nbytes: _series(world, schedule, nbytes, times) for nbytes, times in SERIES.items()}
        medians_s = {nbytes: median_s for nbytes, (median_s, _) in seen.items()}
        return Exchanged(world.transport.kind, medians_s, sum(wrong for _, wrong in seen.values()))


def _series(world: World, schedule: Schedule, nbytes: int, times: int) -> tuple[float, int]:
    """Median time of an all-reduce, and how many sums were wrong."""
    buffer = world.transport.allocate(nbytes // 4, torch.float32)
    places = torch.arange(buffer.numel(), device="cpu") % 1000
    total = world.size * (world.size + 1) / 2 * places  # exact: small whole numbers
    seconds, wrong = list[float](), 0
    for _ in range(times + 1):
        buffer.copy_((world.rank + 1) * places)
        begin_s = perf_counter()
        world.run(schedule, buffer)
        seconds.append(perf_counter() - begin_s)
        wrong += int((buffer != total).sum())
    return median(seconds[1:]), wrong


def _judged(schedule: Schedule, first: Exchanged, wrong: int) -> Finding:
    small, large = min(SERIES), max(SERIES)
    latency_us, gbytes_per_s = 1e6 * first.median_s[small], large / first.median_s[large] / 1e9
    facts = {
        "transport": first.transport,
        "schedule": schedule.name,
        "latency_us": round(latency_us, 1),
        "gbytes_per_s": round(gbytes_per_s, 3),
        "median_s": {str(nbytes): seconds for nbytes, seconds in first.median_s.items()},
    }
    if wrong:
        detail = f"two processes summed over {first.transport}, and {wrong:,} elements are wrong"
        return Finding("exchange", "problem", detail, "Do not train here: report it, with this output.", facts)
    detail = (
        f"two processes summed along a proven {schedule.name} over {first.transport}: {small} B in {latency_us:.0f} "
        f"us, {large >> 20} MiB at {gbytes_per_s:.2f} GB/s sent by each"
    )
    return Finding("exchange", "ok", detail, facts=facts)
