# SPDX-License-Identifier: Apache-2.0
"""Records of measurements, one JSON line each, of which pages and pictures are made.

A record has the suite, the case and the variant; the median and the 20th and 80th percentile of its seconds; the ratio
to a peer that was measured in the same rounds; the bytes to move, that many per second, and over those of a copy in the
same run; the machine, the versions and the date.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from interleaved import Times, record

__all__ = ["Figures", "Record", "append", "bus_bandwidth", "made", "provenance", "read"]

Record = dict[str, Any]
Figures = Callable[[str, float], dict[str, float]]
"""(variant, its median in seconds) -> more figures of the variant."""
HERE = Path(__file__).parent
PACKAGES = ("torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def made(
    suite: str, case: str, times: Times, peers: dict[str, str], figures: Figures = lambda *_: {}, **more: Any
) -> Iterator[Record]:
    """Yield a record for each variant with a peer. `figures` adds figures of its own, `more` is the same for all."""
    for variant, peer in peers.items():
        own = record(times, variant, peer)
        told = {"suite": suite, "case": case, "variant": variant, **own, **figures(variant, float(own["median_s"]))}
        yield {**told, **more, **provenance()}


def bus_bandwidth(nbytes: int, ranks: int) -> Figures:
    """Return the least bytes that a rank must send per second in an all-reduce of fp32; with bf16, half of that.

    >>> bus_bandwidth(4_000_000_000, 4)("ring bf16", 2.0)
    {'bus_gb_per_s': 1.5}
    """
    least = nbytes / 1e9 * 2 * (ranks - 1) / ranks
    return lambda variant, seconds: {"bus_gb_per_s": least * (0.5 if "bf16" in variant else 1.0) / seconds}


def append(path: Path | None, records: Iterator[Record] | Sequence[Record]) -> None:
    """Append records to the file, if there is one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(rounded(each)) + "\n" for each in records)


def rounded(value: Any) -> Any:
    """Return `value` with six digits of each float in it: more say nothing.

    >>> rounded({"ratio": 0.12345678, "rounds": 12})
    {'ratio': 0.123457, 'rounds': 12}
    """
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(paths: Sequence[Path]) -> list[Record]:
    """Return all records of some files; if something was measured twice, the last one."""
    found = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            found[one["suite"], one["case"], one["variant"]] = one
    return list(found.values())


@cache
def provenance() -> dict[str, str | int]:
    """Return the machine, the versions and the date of a measurement."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": device(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def commit() -> str:
    """Return the commit of the measured code, and say if the code was changed since."""
    name = _git("rev-parse", "--short=10", "HEAD")
    return f"{name}, changed" if name and _git("status", "--porcelain", "--untracked-files=no") else name or "unknown"


def device() -> str:
    """Return the name of the GPU, or of the processor if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    return f"no GPU, {names[0] if names else platform.machine()}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)  # noqa: S607  # git of the user's PATH
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
