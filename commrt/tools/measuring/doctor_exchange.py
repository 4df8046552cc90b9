# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor`` lets two processes of this host exchange: that it works, how fast, and right.

They are forked, so it must come before anything starts threads, and torch computes with one thread
meanwhile. No process is left after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from commrt.algorithms import ring
from commrt.errors import CommrtError, DisagreementError, UsageError
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.runtime.connection import shared_host, suited, transport_called
from commrt.runtime.explanation import Explanation
from commrt.runtime.init import init
from commrt.schedule import Schedule
from commrt.store.addresses import host_identity
from commrt.testing.workers import run_workers
from commrt.tools.measuring.findings import Finding
from commrt.transport.names import chosen_transport

RANKS = 2
LIMIT_S = 4.0
"""Limit of the exchange, which takes a quarter of a second on an idle machine."""
SERIES = {256: 21, 64 << 10: 11, 4 << 20: 7}
"""How often each number of bytes is reduced; one more run before these warms up."""
EXPLAINED = (1 << 10, 25 << 20)
"""Bytes of which it is said what `World.all_reduce` runs: few, and a usual bucket."""
EXCHANGE_ADVICE = {
    "shared": (
        "Try COMMRT_TRANSPORT=gloo: if it works, something forbids shared memory between processes."
    ),
    "gloo": (
        "Check that no firewall or sandbox keeps processes of this host from connecting over"
        " 127.0.0.1."
    ),
}


class Exchanged(NamedTuple):
    """What one rank of the exchange measured."""

    transport: str
    median_s: dict[int, float]
    """Time of an all-reduce, by its bytes."""
    wrong: int
    """Elements of sums that had a wrong value."""
    runs: list[Explanation]
    """What `World.all_reduce` of `EXPLAINED` runs."""


def exchange() -> Iterator[Finding]:
    """Let two forked processes all-reduce over the transport of ``init()``, and check the sums."""
    schedule = ring.all_reduce(RANKS)
    prove(schedule, all_reduce(RANKS, schedule.chunks))
    hosts = [shared_host(host_identity(), rank) for rank in range(RANKS)]
    asked = (transport_called(chosen_transport()) or suited(hosts)).kind
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forked processes cannot inherit more
    try:
        results = run_workers(RANKS, lambda: measure(schedule), limit_s=LIMIT_S)
    except (UsageError, DisagreementError) as error:
        yield Finding("exchange", "problem", str(error), "Do what the message says.")
    except CommrtError as error:
        yield Finding(
            "exchange",
            "problem",
            f"two processes could not exchange: {error}",
            EXCHANGE_ADVICE[asked],
        )
    else:
        yield _judged(schedule.name, results[0], sum(each.wrong for each in results.values()))
    finally:
        torch.set_num_threads(threads)


def measure(schedule: Schedule) -> Exchanged:
    """Run the exchange in one of the processes."""
    torch.set_num_threads(1)
    medians_s = dict[int, float]()
    wrong = 0
    with init(LIMIT_S, start_timeout_s=LIMIT_S) as world:
        for nbytes, times in SERIES.items():
            buffer = world.transport.allocate(nbytes // 4, torch.float32)
            seconds = list[float]()
            values = torch.arange(buffer.numel(), device="cpu") % 1000
            # small whole numbers, so sums are exact
            total = world.size * (world.size + 1) / 2 * values
            for _ in range(times + 1):
                buffer.copy_((world.rank + 1) * values)
                begin_s = perf_counter()
                world.run(schedule, buffer)
                seconds.append(perf_counter() - begin_s)
                wrong += int((buffer != total).sum())
            medians_s[nbytes] = median(seconds[1:])
        runs = [*map(world.explain, EXPLAINED)]
        return Exchanged(world.transport.kind, medians_s, wrong, runs)


def _judged(schedule: str, first: Exchanged, wrong: int) -> Finding:
    if wrong:
        detail = (
            f"two processes all-reduced over {first.transport}, and {wrong:,} elements are wrong"
        )
        return Finding(
            "exchange", "problem", detail, "Do not train here. Report it with this output."
        )
    small = min(SERIES)
    large = max(SERIES)
    latency_us = 1e6 * first.median_s[small]
    gbytes_per_s = large / first.median_s[large] / 1e9
    facts = {"transport": first.transport, "latency_us": latency_us, "gbytes_per_s": gbytes_per_s}
    times = (
        f"{small} B in {latency_us:.0f} us, {large >> 20} MiB at {gbytes_per_s:.2f} GB/s sent by"
        " each"
    )
    detail = f"two processes all-reduced along a proven {schedule} over {first.transport}: {times}"
    detail = "\n".join([detail, *map(_sentence, first.runs)])
    return Finding("exchange", "ok", detail, facts=facts)


def _sentence(run: Explanation) -> str:
    """Return what `World.all_reduce` runs here for so many bytes, and prices beside it."""
    what = f"{run.nbytes:,} B run {run.schedule} over {run.transport} as {run.wire}, {run.kernel}"
    prices = ", ".join(map(str, run.alternatives[:2]))
    return f"all_reduce of {what}: {1e3 * run.seconds:.3g} ms by {run.cluster}.toml; {prices}"
