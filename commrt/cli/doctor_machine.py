# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: what ranks find on this host. Memory, files, processors, a real exchange, GPUs and NCCL."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import combinations
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import NamedTuple

import torch

from commrt.algorithms import ring
from commrt.cli.doctor_environment import Finding, cpus, guarded, nccl_files
from commrt.cli.workers import run_workers
from commrt.errors import CommrtError, DisagreementError, UsageError
from commrt.membership.launcher import Launch, chosen_transport
from commrt.proof.replay import prove
from commrt.proof.spec import all_reduce
from commrt.runtime.init import init
from commrt.schedule import Schedule
from commrt.transport.channel import SEGMENT_NBYTES, Arena, host_identity

__all__ = ["Exchanged", "examine", "exchange", "files", "gpus", "measure", "nccl", "needed_files", "processors"]

LACKING = "this platform lacks memfd_create or abstract sockets"
FILES_ALONE, FILES_PER_PEER = 40, 6
"""Upper bounds of what ranks of 2 to 8 processes hold: 14, and 4 (Gloo) or 5 (shared memory) for each peer."""
CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
READS, SLOW_READ_NS = 2000, 1000.0
"""A read of the processor's own counter takes a tenth of the slow one."""
RANKS, LIMIT_S = 2, 4.0
"""Of the exchange, which takes a quarter of a second on an idle machine."""
SERIES = {256: 21, 64 << 10: 11, 4 << 20: 7}
"""How often each number of bytes is reduced; one more run before these warms up."""
EXCHANGE_ADVICE = {
    "shared": "Try COMMRT_TRANSPORT=gloo: if it works, something forbids shared memory between processes.",
    "gloo": "Check that no firewall or sandbox keeps processes of this host from connecting over 127.0.0.1.",
}
DRIVER = Path("/dev/nvidiactl")
"""Exists if NVIDIA's driver is loaded."""
COMPILED_FROM = 80
"""Oldest compute capability (80 is 8.0) for which the Triton kernels have been compiled and inspected; see `bench/`."""
MOST_PAIRS = 4
"""Pairs of GPUs that a finding names."""
NCCL_AT_LEAST = 21800
"""The oldest NCCL that CuPy 14 works with, as NCCL encodes 2.18.0."""


def examine(launch: Launch | None, quick: bool) -> Iterator[Finding]:
    """Yield all findings of this module. The exchange forks, so it comes before checks that load a driver or NCCL."""
    yield from guarded("transport", transport)
    yield from guarded("shared memory", shared_memory)
    yield from guarded("open files", lambda: files(launch))
    yield from guarded("processors", lambda: processors(launch, torch.get_num_threads()))
    yield from guarded("clock", clock)
    if not quick:
        yield from guarded("exchange", exchange)
    yield from guarded("gpu", lambda: gpus(torch.cuda, torch.version.cuda))
    yield from guarded("nccl", nccl)


def transport() -> Iterator[Finding]:
    """Yield the transport that ``init()`` would choose."""
    asked, here = chosen_transport(), "Gloo" if host_identity() is None else "shared memory"
    if asked == "shared" and host_identity() is None:
        yield Finding("transport", "problem", f"COMMRT_TRANSPORT=shared, but {LACKING}", "Unset it.")
    else:
        detail = f"COMMRT_TRANSPORT={asked}" if asked else f"ranks on this host: {here}; on several hosts: Gloo"
        yield Finding("transport", "ok", detail)


def shared_memory() -> Iterator[Finding]:
    """Allocate a shared segment, as ranks of one host do, and write to it."""
    if host_identity() is None:
        yield Finding("shared memory", "absent", f"{LACKING}: ranks of one host exchange through Gloo")
        return
    try:
        Arena().allocate(1 << 12, torch.uint8).fill_(1)  # few bytes, so that torch starts no threads before a fork
    except (OSError, ValueError, RuntimeError) as error:
        detail = f"a segment of {SEGMENT_NBYTES >> 20} MiB cannot be allocated: {error}"
        advice = "Raise the limits (ulimit -v, -f), or set COMMRT_TRANSPORT=gloo."
        yield Finding("shared memory", "problem", detail, advice)
    else:
        yield Finding("shared memory", "ok", "anonymous files: limited by memory only, not by the size of /dev/shm")


def files(launch: Launch | None) -> Iterator[Finding]:
    """Compare the limit of open files with what a rank of this launch needs."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = 1 if launch is None else launch.size
    needed = needed_files(size)
    facts = {"limit": limit, "needed": needed, "ranks": size}
    if 0 <= limit < needed:
        detail = f"at most {limit} in a process, but a rank of {size} needs about {needed}"
        more = "in this shell" if most < 0 or most >= needed else "as administrator: the hard limit is too low as well"
        yield Finding("open files", "problem", detail, f"Raise it with ulimit -n {needed}, {more}.", facts)
    else:
        shown = "no limit" if limit < 0 else f"at most {limit:,} in a process"
        ranks = (limit - FILES_ALONE) // FILES_PER_PEER if limit >= 0 else inf
        yield Finding("open files", "ok", f"{shown}, enough for {ranks:,} ranks that all exchange", facts=facts)


def needed_files(ranks: int) -> int:
    """Return how many file descriptors a rank needs that exchanges with all others."""
    return FILES_ALONE + FILES_PER_PEER * (ranks - 1)


def processors(launch: Launch | None, threads: int) -> Iterator[Finding]:
    """Compare the processors with the ranks of this host, which compute with `threads` threads each."""
    count, ranks = cpus(), 1 if launch is None else max(launch.local_size, 1)
    facts = {"cpus": count, "threads": threads}
    if ranks > count:
        detail = f"{count:g} for {ranks} ranks of this host: ranks wait for a processor, which distorts timings"
        yield Finding("processors", "warning", detail, f"Start {count:g} ranks here, or expect slow steps.", facts)
    elif ranks > 1 and ranks * threads > count:
        detail = f"{count:g} for {ranks} ranks with {threads} threads each: communication threads wait for a processor"
        advice = f"Set OMP_NUM_THREADS={max(int(count // ranks), 1)}, or call torch.set_num_threads."
        yield Finding("processors", "warning", detail, advice, facts)
    else:
        yield Finding("processors", "ok", f"{count:g}, and torch computes with {threads} threads", facts=facts)


def clock() -> Iterator[Finding]:
    """Measure how long reading the time takes: waits on one host read it in a loop."""
    begin_s = perf_counter()
    for _ in range(READS):
        perf_counter()
    each_ns = (perf_counter() - begin_s) / READS * 1e9
    source = CLOCK.read_text(encoding="ascii").strip() if CLOCK.exists() else "unknown"
    facts, detail = {"read_ns": round(each_ns, 1), "source": source}, f"{source}, read in {each_ns:.0f} ns"
    if each_ns > SLOW_READ_NS:
        detail += ": every wait and every range of a timeline reads it"
        yield Finding("clock", "warning", detail, "Let the kernel use tsc, if this machine's is reliable.", facts)
    else:
        yield Finding("clock", "ok", detail, facts=facts)


class Exchanged(NamedTuple):
    """What one rank of the exchange measured."""

    transport: str
    median_s: dict[int, float]
    """Time of an all-reduce, by its bytes."""
    wrong: int
    """Elements of sums that had a wrong value."""


def exchange() -> Iterator[Finding]:
    """Let two forked processes all-reduce over the transport that ``init()`` would choose, and check the sums."""
    schedule = ring.all_reduce(RANKS)
    prove(schedule, all_reduce(RANKS, schedule.chunks))
    asked = chosen_transport() or ("gloo" if host_identity() is None else "shared")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forked processes cannot inherit more
    try:
        results = run_workers(RANKS, lambda: measure(schedule), limit_s=LIMIT_S)
    except (UsageError, DisagreementError) as error:
        yield Finding("exchange", "problem", str(error), "Do what the message says.")
    except CommrtError as error:
        yield Finding("exchange", "problem", f"two processes could not exchange: {error}", EXCHANGE_ADVICE[asked])
    else:
        yield _judged(schedule.name, results[0], sum(each.wrong for each in results.values()))
    finally:
        torch.set_num_threads(threads)


def measure(schedule: Schedule) -> Exchanged:
    """Run the exchange in one of the processes."""
    torch.set_num_threads(1)
    medians_s, wrong = dict[int, float](), 0
    with init(LIMIT_S, start_timeout_s=LIMIT_S) as world:
        for nbytes, times in SERIES.items():
            buffer, seconds = world.transport.allocate(nbytes // 4, torch.float32), list[float]()
            values = torch.arange(buffer.numel(), device="cpu") % 1000
            total = world.size * (world.size + 1) / 2 * values  # small whole numbers, so sums are exact
            for _ in range(times + 1):
                buffer.copy_((world.rank + 1) * values)
                begin_s = perf_counter()
                world.run(schedule, buffer)
                seconds.append(perf_counter() - begin_s)
                wrong += int((buffer != total).sum())
            medians_s[nbytes] = median(seconds[1:])
        return Exchanged(world.transport.kind, medians_s, wrong)


def _judged(schedule: str, first: Exchanged, wrong: int) -> Finding:
    small, large = min(SERIES), max(SERIES)
    latency_us, gbytes_per_s = 1e6 * first.median_s[small], large / first.median_s[large] / 1e9
    facts = {
        "transport": first.transport,
        "schedule": schedule,
        "latency_us": round(latency_us, 1),
        "gbytes_per_s": round(gbytes_per_s, 3),
        "median_s": {str(nbytes): seconds for nbytes, seconds in first.median_s.items()},
    }
    if wrong:
        detail = f"two processes all-reduced over {first.transport}, and {wrong:,} elements are wrong"
        return Finding("exchange", "problem", detail, "Do not train here. Report it with this output.", facts)
    times = f"{small} B in {latency_us:.0f} us, {large >> 20} MiB at {gbytes_per_s:.2f} GB/s sent by each"
    detail = f"two processes all-reduced along a proven {schedule} over {first.transport}: {times}"
    return Finding("exchange", "ok", detail, facts=facts)


def gpus(cuda: ModuleType, built_for: str | None, driver: Path = DRIVER) -> Iterator[Finding]:
    """Yield a finding for each GPU, then one for their links. `cuda` is torch.cuda, `built_for` torch's CUDA version.

    A query that fails becomes a finding too.
    """
    count = cuda.device_count() if cuda.is_available() else 0
    for number in range(count):
        yield from guarded(f"gpu {number}", lambda number=number: _gpu(cuda, number))  # type: ignore[misc]
    if count > 1:
        yield from guarded("gpu links", lambda: _links(cuda, count))
    if count:
        return
    if not driver.exists():
        yield Finding("gpu", "absent", "no CUDA device", "commrt runs on the CPU here.")
    elif built_for is None:
        detail = "NVIDIA's driver is loaded, but this torch was built without CUDA: commrt runs on the CPU"
        yield Finding("gpu", "warning", detail, "Install a build of torch with CUDA.")
    else:
        detail = f"NVIDIA's driver is loaded, but torch for CUDA {built_for} can use no GPU: commrt runs on the CPU"
        yield Finding("gpu", "warning", detail, "Compare the driver's CUDA version (nvidia-smi) with torch's.")


def _gpu(cuda: ModuleType, number: int) -> Iterator[Finding]:
    device, arches = cuda.get_device_properties(number), cuda.get_arch_list()
    capability, version = 10 * device.major + device.minor, f"{device.major}.{device.minor}"
    facts = {"device": device.name, "nbytes": device.total_memory, "capability": version}
    detail = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {version}"
    if not is_built_for(capability, arches):
        detail += f": torch's kernels were compiled for {', '.join(arches)}"
        yield Finding(f"gpu {number}", "problem", detail, f"Install a build of torch for {version}.", facts)
    elif capability < COMPILED_FROM:
        detail += ": commrt's kernels were compiled for 8.0 and later only"
        yield Finding(f"gpu {number}", "warning", detail, "Run make gpu-check before you rely on it.", facts)
    else:
        yield Finding(f"gpu {number}", "ok", f"{detail}; torch and commrt have kernels for it", facts=facts)


def is_built_for(capability: int, arches: Sequence[str]) -> bool:
    """Return True if code for one of `arches` runs on `capability`: binaries within a major version, PTX on later ones.

    >>> is_built_for(86, ["sm_80", "sm_90"]), is_built_for(75, ["sm_80"]), is_built_for(120, ["sm_80", "compute_90"])
    (True, False, True)
    """
    known = [(match[1], int(match[2])) for arch in arches if (match := re.match(r"(sm|compute)_(\d+)", arch))]
    fitting = (code <= capability and (kind == "compute" or code // 10 == capability // 10) for kind, code in known)
    return not known or any(fitting)


def _links(cuda: ModuleType, count: int) -> Iterator[Finding]:
    peer, pairs = cuda.can_device_access_peer, [*combinations(range(count), 2)]
    apart = [(one, other) for one, other in pairs if not (peer(one, other) and peer(other, one))]
    facts = {"pairs": len(pairs), "without_peer_access": apart}
    if not apart:
        yield Finding("gpu links", "ok", f"each of {count} GPUs can access the memory of all others", facts=facts)
        return
    named = ", ".join(f"{one} and {other}" for one, other in apart[:MOST_PAIRS])
    more = f" and {len(apart) - MOST_PAIRS} other pairs" if len(apart) > MOST_PAIRS else ""
    detail = f"no peer access between GPUs {named}{more}: they exchange through host memory"
    yield Finding("gpu links", "warning", detail, "nvidia-smi topo -m shows how they are connected.", facts)


def nccl() -> Iterator[Finding]:
    """Load the NCCL that GPUs would use, and yield one finding about its version and its copies."""
    if find_spec("cupy") is None:
        yield Finding("nccl", "absent", "commrt reaches it through CuPy, which is not installed", "Only GPUs need it.")
        return
    from commrt.transport.nccl_communicator import load, named  # noqa: PLC0415  # imports CuPy

    binding = load()
    runtime, built, torchs, copies = binding.get_version(), binding.get_build_version(), _nccl_of_torch(), nccl_files()
    facts = {"loaded": named(runtime), "cupy_built_with": named(built), "torch_links": torchs, "files": copies}
    linked = f"torch links {torchs}" if torchs else "torch has none of its own"
    detail = f"{named(runtime)}, CuPy was built with {named(built)}, {linked}"
    if runtime < NCCL_AT_LEAST:
        yield Finding("nccl", "problem", detail, "commrt needs 2.18 or later: upgrade nvidia-nccl.", facts)
    elif len(copies) > 1 or torchs not in (None, named(runtime)):
        advice = "Two copies share no state and can deadlock: install the version that torch needs."
        yield Finding("nccl", "warning", f"{detail}; two are loaded: {', '.join(copies)}", advice, facts)
    else:
        yield Finding("nccl", "ok", detail, facts=facts)


def _nccl_of_torch() -> str | None:
    """Return the version of NCCL that torch calls; None if it was built without."""
    with suppress(AttributeError, RuntimeError, ImportError):
        if torch.cuda.is_available() or torch.version.cuda is not None:
            return ".".join(map(str, torch.cuda.nccl.version()[:3]))  # type: ignore[no-untyped-call]
    return None
