# SPDX-License-Identifier: Apache-2.0
"""GPUs and how they reach each other, for ``commrt doctor``; written against the few calls of `Cuda`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from commrt.cli.findings import Finding, guarded

__all__ = ["Cuda", "gpus", "is_built_for"]

DRIVER = Path("/dev/nvidiactl")
"""There where NVIDIA's driver is loaded."""
COMPILED = (80, 90, 100)
"""Compute capabilities (80 is 8.0) for which the Triton kernels have been compiled and looked at; see `bench/`."""
MOST_NAMED = 4
"""Pairs that a row names."""


class Cuda(Protocol):
    """What is asked of ``torch.cuda``."""

    def is_available(self) -> bool:
        """True if torch can compute on a GPU."""
        ...

    def device_count(self) -> int:
        """How many it sees."""
        ...

    def get_device_properties(self, device: int, /) -> Any:
        """With name, total_memory in bytes, major and minor."""
        ...

    def can_device_access_peer(self, device: int, peer_device: int, /) -> bool:
        """True if one reads the other's memory without the host."""
        ...

    def get_arch_list(self) -> list[str]:
        """What torch's own kernels were compiled for, such as sm_90."""
        ...


def gpus(cuda: Cuda, built_for: str | None, driver: Path = DRIVER) -> Iterator[Finding]:
    """Each GPU, then the links; `built_for` is torch's CUDA. What cannot be asked is a finding too."""
    count = cuda.device_count() if cuda.is_available() else 0
    if not count:
        yield _none(built_for, is_driver_there=driver.exists())
        return
    for number in range(count):
        yield from guarded(f"gpu {number}", lambda number=number: _one(cuda, number))  # type: ignore[misc]
    if count > 1:
        yield from guarded("gpu links", lambda: _links(cuda, count))


def _none(built_for: str | None, *, is_driver_there: bool) -> Finding:
    if not is_driver_there:
        return Finding("gpu", "absent", "no CUDA device", "commrt runs on the CPU here.")
    if built_for is None:
        detail = "NVIDIA's driver is loaded, and this torch was built without CUDA: commrt runs on the CPU here"
        return Finding("gpu", "warning", detail, "Install a build of torch with CUDA.")
    detail = f"NVIDIA's driver is loaded, and torch, built for CUDA {built_for}, can use no GPU: commrt runs on the CPU"
    return Finding("gpu", "warning", detail, "Compare the driver's CUDA (nvidia-smi) with torch's.")


def _one(cuda: Cuda, number: int) -> Iterator[Finding]:
    device = cuda.get_device_properties(number)
    capability = 10 * device.major + device.minor
    facts = {
        "device": device.name,
        "nbytes": device.total_memory,
        "capability": f"{device.major}.{device.minor}",
    }
    said = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
    if not is_built_for(capability, cuda.get_arch_list()):
        built = ", ".join(cuda.get_arch_list())
        detail = f"{said}: torch's kernels were compiled for {built}"
        yield Finding(f"gpu {number}", "problem", detail, "Install a build of torch that names it.", facts)
    elif capability < min(COMPILED):
        detail = f"{said}: commrt's kernels were compiled for 8.0 and later only"
        yield Finding(f"gpu {number}", "warning", detail, "Run make gpu-check before you rely on it.", facts)
    else:
        yield Finding(f"gpu {number}", "ok", f"{said}; torch and commrt have kernels for it", facts=facts)


def is_built_for(capability: int, arches: Sequence[str]) -> bool:
    """True if code for one of `arches` runs on `capability`; within a major version later ones run earlier ones' code.

    >>> is_built_for(86, ["sm_80", "sm_90"]), is_built_for(75, ["sm_80"]), is_built_for(120, ["sm_80", "compute_90"])
    (True, False, True)
    """
    known = [(match[1], int(match[2])) for arch in arches if (match := re.match(r"(sm|compute)_(\d+)", arch))]
    same = any(kind == "sm" and code // 10 == capability // 10 and code <= capability for kind, code in known)
    return not known or same or any(kind == "compute" and code <= capability for kind, code in known)


def _links(cuda: Cuda, count: int) -> Iterator[Finding]:
    pairs = [*combinations(range(count), 2)]
    apart = [
        pair for pair in pairs if not (cuda.can_device_access_peer(*pair) and cuda.can_device_access_peer(*pair[::-1]))
    ]
    facts = {"pairs": len(pairs), "without_peer_access": apart}
    if not apart:
        yield Finding("gpu links", "ok", f"each of {count} GPUs reaches the memory of each other", facts=facts)
        return
    named = ", ".join(f"{one} and {other}" for one, other in apart[:MOST_NAMED])
    more = f" and {len(apart) - MOST_NAMED} other pairs" if len(apart) > MOST_NAMED else ""
    detail = f"no peer access between GPUs {named}{more}: what they exchange passes through the host's memory"
    yield Finding("gpu links", "warning", detail, "nvidia-smi topo -m shows how they are connected.", facts)
