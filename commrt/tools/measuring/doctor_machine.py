# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor`` with torch: what ranks find on this host, in the order in which `examine` asks.

Transport, open files, processors, GPUs, NCCL; the exchange between two processes is in
`doctor_exchange`. Nothing is changed, but drivers and NCCL stay loaded.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import combinations
from math import inf
from pathlib import Path
from types import ModuleType

import torch

from commrt.runtime.connection import transport_called
from commrt.store.addresses import host_identity
from commrt.store.launcher import Launch
from commrt.tools.measuring.doctor_exchange import exchange
from commrt.tools.measuring.findings import Finding, guarded
from commrt.transport.names import chosen_transport

FILES_ALONE = 40
FILES_PER_PEER = 6
"""Upper bounds of files: ranks of 2 to 8 hold 14, and 4 (Gloo) or 5 (shared memory) per peer."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The control group's limit."""
DRIVER = Path("/dev/nvidiactl")
"""Exists if NVIDIA's driver is loaded."""
COMPILED_FROM = (8, 0)
"""Oldest compute capability that Triton kernels were compiled and inspected for; see `dev/`."""
NCCL_AT_LEAST = 21800
"""The oldest NCCL that CuPy 14 works with, as NCCL encodes 2.18.0."""


def examine(launch: Launch | None, quick: bool) -> Iterator[Finding]:
    """Yield all findings of this module, and that of the exchange, unless `quick`.

    The exchange forks, so it comes before checks that load a driver or NCCL.
    """
    yield from guarded("transport", transport)
    yield from guarded("open files", files, launch)
    yield from guarded("processors", processors, launch, torch.get_num_threads())
    if not quick:
        yield from guarded("exchange", exchange)
    yield from guarded("gpu", gpus, torch.cuda, torch.version.cuda)
    yield from guarded("nccl", nccl)


def transport() -> Iterator[Finding]:
    """Yield the transport that ``init()`` would choose."""
    asked = chosen_transport()
    shares_memory = host_identity() is not None
    if (named := transport_called(asked)) is not None and named.one_host and not shares_memory:
        detail = (
            f"COMMRT_TRANSPORT={asked}, but this platform lacks memfd_create or abstract sockets"
        )
        yield Finding("transport", "problem", detail, "Unset it.")
    elif asked:
        yield Finding("transport", "ok", f"COMMRT_TRANSPORT={asked}")
    else:
        here = "shared memory" if shares_memory else "Gloo"
        yield Finding("transport", "ok", f"ranks on this host: {here}; on several hosts: Gloo")


def files(launch: Launch | None) -> Iterator[Finding]:
    """Compare the limit of open files with what a rank of this launch needs."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = 1 if launch is None else launch.size
    needed = needed_files(size)
    if 0 <= limit < needed:
        detail = f"at most {limit} in a process, but a rank of {size} needs about {needed}"
        more = (
            "in this shell"
            if most < 0 or most >= needed
            else "as administrator: the hard limit is too low as well"
        )
        yield Finding("open files", "problem", detail, f"Raise it with ulimit -n {needed}, {more}.")
    else:
        shown = "no limit" if limit < 0 else f"at most {limit:,} in a process"
        yield Finding("open files", "ok", f"{shown}; a rank of {size:,} needs {needed:,}")


def needed_files(ranks: int) -> int:
    """Return how many file descriptors a rank needs that exchanges with all others."""
    return FILES_ALONE + FILES_PER_PEER * (ranks - 1)


def processors(launch: Launch | None, threads: int) -> Iterator[Finding]:
    """Compare the processors with this host's ranks, which compute with `threads` threads each."""
    count = cpus()
    ranks = 1 if launch is None else max(launch.local_size, 1)
    detail = f"{count:g} for {ranks} rank{'s' * (ranks > 1)} with {threads} threads each"
    if ranks > count:
        detail += ": ranks wait for a processor, which distorts timings"
        yield Finding(
            "processors", "warning", detail, f"Start {count:g} ranks here, or expect slow steps."
        )
    elif ranks * threads > count:
        advice = (
            f"Set OMP_NUM_THREADS={max(int(count // ranks), 1)}, or call torch.set_num_threads."
        )
        yield Finding("processors", "warning", f"{detail}: threads wait for a processor", advice)
    else:
        yield Finding("processors", "ok", detail)


def cpus() -> float:
    """Return how many processors this process may use, by affinity and control group's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        # such as "150000 100000" or "max 100000"
        most, period = QUOTA.read_text(encoding="ascii").split()
        return min(allowed, inf if most == "max" else int(most) / int(period))
    except (OSError, ValueError):
        return allowed


def gpus(cuda: ModuleType, built_for: str | None, driver: Path = DRIVER) -> Iterator[Finding]:
    """Yield a finding for each GPU, then one for their links.

    `cuda` is torch.cuda, `built_for` torch's CUDA version. A query that fails becomes a finding
    too.
    """
    count = cuda.device_count() if cuda.is_available() else 0
    for number in range(count):
        yield from guarded(f"gpu {number}", _gpu, cuda, number)
    if count > 1:
        yield from guarded("gpu links", _links, cuda, count)
    if count:
        return
    if not driver.exists():
        yield Finding("gpu", "absent", "no CUDA device", "commrt runs on the CPU here.")
    elif built_for is None:
        detail = (
            "NVIDIA's driver is loaded, but this torch was built without CUDA: commrt runs on"
            " the CPU"
        )
        yield Finding("gpu", "warning", detail, "Install a build of torch with CUDA.")
    else:
        detail = (
            f"NVIDIA's driver is loaded, but torch for CUDA {built_for} can use no GPU: commrt runs"
            " on the CPU"
        )
        advice = (
            "Look at CUDA_VISIBLE_DEVICES, and compare the driver's CUDA version (nvidia-smi) with"
            " torch's."
        )
        yield Finding("gpu", "warning", detail, advice)


def _gpu(cuda: ModuleType, number: int) -> Iterator[Finding]:
    device = cuda.get_device_properties(number)
    run_kernel(number)
    detail = (
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability"
        f" {device.major}.{device.minor}"
    )
    if (device.major, device.minor) < COMPILED_FROM:
        detail += ": commrt's kernels were compiled for 8.0 and later only"
        yield Finding(f"gpu {number}", "warning", detail, "Run make gpu before you rely on it.")
    else:
        yield Finding(f"gpu {number}", "ok", detail)


def run_kernel(number: int) -> None:
    """Run a torch kernel on a GPU; raises if torch was not built for it, or its memory is full."""
    torch.zeros(1, device=f"cuda:{number}").add_(1).item()


def _links(cuda: ModuleType, count: int) -> Iterator[Finding]:
    peer = cuda.can_device_access_peer
    apart = [
        f"{a} and {b}" for a, b in combinations(range(count), 2) if not (peer(a, b) and peer(b, a))
    ]
    if apart:
        detail = (
            f"no peer access between GPUs {', '.join(apart)}: ranks of this host exchange through"
            " NCCL only"
        )
        yield Finding(
            "gpu links", "warning", detail, "nvidia-smi topo -m shows how they are connected."
        )
    else:
        yield Finding(
            "gpu links",
            "ok",
            f"each of {count} GPUs can read the memory of all others, and ranks do",
        )


def nccl() -> Iterator[Finding]:
    """Load the NCCL that GPUs would use, and yield one finding about its version and its copies."""
    if find_spec("cupy") is None:
        yield Finding(
            "nccl",
            "absent",
            "commrt reaches it through CuPy, which is not installed",
            "Only GPUs need it.",
        )
        return
    from commrt.transport.nccl_binding import load, named  # noqa: PLC0415  # imports CuPy

    binding = load()
    runtime = binding.get_version()
    torchs = _nccl_of_torch()
    copies = nccl_files()
    linked = f"torch links {torchs}" if torchs else "torch has none of its own"
    detail = f"{named(runtime)}, CuPy was built with {named(binding.get_build_version())}, {linked}"
    if runtime < NCCL_AT_LEAST:
        yield Finding("nccl", "problem", detail, "commrt needs 2.18 or later: upgrade nvidia-nccl.")
    elif len(copies) > 1 or torchs not in (None, named(runtime)):
        advice = "Two copies share no state and can deadlock: install the version that torch needs."
        yield Finding("nccl", "warning", f"{detail}; loaded: {', '.join(copies)}", advice)
    else:
        yield Finding("nccl", "ok", detail)


def nccl_files() -> list[str]:
    """Return the files of NCCL that this process has loaded."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"\s(/\S*libnccl\.so\S*)$", text, re.MULTILINE)))


def _nccl_of_torch() -> str | None:
    """Return the version of NCCL that torch calls; None if it was built without."""
    with suppress(AttributeError, RuntimeError, ImportError):
        if torch.cuda.is_available() or torch.version.cuda is not None:
            return ".".join(map(str, torch.cuda.nccl.version()[:3]))  # type: ignore[no-untyped-call]
    return None
