# SPDX-License-Identifier: Apache-2.0
"""Measure the limits of this machine, which the kernels are compared with; as a command, print them as JSON.

The limits: the fastest of three ways to copy buffers that no cache holds, the time of a launch that does nothing, the
resolution of the GPU's clock, the number of tensors that torch's multi-tensor kernels take per launch, and whether
torch's DDP can copy gradients in batches.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from platform import processor
from typing import Any

import torch
from gpu_timer import HAS_GPU, MODES, stopwatch
from interleaved import spread
from kernel_variants import DEVICE, flat_copies
from torch.nn.parallel import DistributedDataParallel

__all__ = ["calls_of", "copies", "copy_bytes_per_s", "machine"]

ROUNDS = 30 if HAS_GPU else 5
NBYTES = (1 << 26, 1 << 28, 1 << 30) if HAS_GPU else (1 << 28,)
HEADER = "ATen/native/cuda/MultiTensorApply.cuh"


def calls_of(nbytes: int) -> int:
    """Return how many calls a measurement has: a few milliseconds' worth on a GPU."""
    if not HAS_GPU:
        return 1 if nbytes > 1 << 25 else 10
    return 20 if nbytes < 1 << 30 else 4


@cache
def copies() -> dict[str, float]:
    """Return bytes read and written per second, by way to copy and size."""
    mode = next(iter(MODES))
    found = {}
    for nbytes in NBYTES:
        watches = {who: stopwatch(mode, run, 1, calls_of(nbytes)) for who, run in flat_copies(nbytes).items()}
        for who, watch in watches.items():
            found[f"{who}, {nbytes >> 20} MiB"] = 2 * nbytes / spread([watch() for _ in range(ROUNDS)])[1]
    return found


def copy_bytes_per_s() -> float:
    """Return the bytes per second of the fastest copy."""
    return max(copies().values())


def machine() -> dict[str, str]:
    """Return the labels that figures of this machine need."""
    name = torch.cuda.get_device_name() if HAS_GPU else f"no GPU, {processor()}"
    return {"device": name, "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def launch_s() -> float:
    """Return the seconds of a nearly empty launch, replayed."""
    element = torch.zeros(1, device=DEVICE)
    mode = next(iter(MODES))
    return spread([stopwatch(mode, lambda _: element.add_(1), 1, 200)() for _ in range(ROUNDS)])[1]


def clock_s() -> float:
    """Return the shortest time that the GPU's clock resolves."""
    gaps = set()
    for _ in range(1000):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        end.synchronize()
        gaps.add(begin.elapsed_time(end) / 1e3)
    ordered = sorted(gaps)
    return min((b - a for a, b in pairwise(ordered)), default=0.0)


def tensors_per_launch() -> str:
    """Return the limits in torch's header, for 1, 2, ... lists of tensors."""
    header = Path(torch.__file__).parent / "include" / HEADER
    found = (
        re.findall(r"depth_to_max_tensors\w*\[\d*\]\s*=\s*\{([^}]*)\}", header.read_text()) if header.exists() else []
    )
    return "; ".join(found) or "unknown"


def report() -> dict[str, Any]:
    """Return all figures."""
    arguments = inspect.signature(DistributedDataParallel.__init__).parameters
    return {
        **machine(),
        "copy_bytes_per_s": copies(),
        "launch_s": launch_s(),
        "clock_s": clock_s() if HAS_GPU else None,
        "foreach_tensors_per_launch": tensors_per_launch(),
        "ddp_batched_grad_copy": "batched_grad_copy" in arguments,
    }


if __name__ == "__main__":
    print(json.dumps(report(), indent=1))
