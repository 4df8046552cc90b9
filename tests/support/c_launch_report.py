# SPDX-License-Identifier: Apache-2.0
"""What arrives at the driver's library through Triton's own launcher in C, as JSON; `stub_cuda.c` is that library."""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from fake_gpu import Driver, fake_gpu
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

from commrt.kernels import dispatch
from commrt.kernels.layout import layout_of

HEADER = 0xF000_0000_0000_0005


class Noted(ctypes.Structure):
    """As in `stub_cuda.c`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("launches", "programs", "threads", "stream")),
        ("arguments", ctypes.c_uint64 * 16),
    )


def launching(driver: Driver) -> SimpleNamespace:
    """What the fake driver has, and what launches in C: part of each kernel's own launcher before Triton 3.7."""
    launch = vars(CudaUtils()) if "launch" in CudaUtils.__init__.__code__.co_names else {}
    return SimpleNamespace(**{**launch, **vars(NO_LAUNCH.fget(driver))})


NO_LAUNCH: Any = Driver.utils


def main() -> None:
    """Pack, unpack and add once each: what was expected, and what arrived."""
    library = ctypes.CDLL("libcuda.so.1")
    noted, count = Noted.in_dll(library, "noted"), ctypes.c_int.in_dll(library, "argument_count")
    Driver.launcher_cls = staticmethod(CudaLauncher)
    Driver.utils = property(launching)
    report: dict[str, Any] = {}

    def note(name: str, programs: int, arguments: list[int]) -> None:
        arrived = [noted.launches, noted.programs, noted.threads, noted.stream, *noted.arguments[: count.value]]
        report[name] = {"arrived": arrived, "expected": [len(report) + 1, programs, noted.threads, 7, *arguments]}

    with fake_gpu():
        tensors = [torch.zeros(5), torch.zeros(50_000)]
        layout = layout_of([5, 50_000])
        wire = torch.zeros(layout.numel, dtype=torch.bfloat16)
        packing = dispatch.packing(wire, layout, tensors)
        columns = [column.data_ptr() for column in packing.tables.columns]
        count.value = 10
        packing.pack(tensors, 0.5, HEADER)
        note("pack", 14, [*columns, wire.data_ptr(), HEADER, packing._scale.at(0.5), 0, 0])
        packing.unpack(tensors, HEADER)
        note("unpack", 14, [*columns, wire.data_ptr(), HEADER, packing._mark, 0, 0])
        own, received = torch.zeros(4096), torch.zeros(3, 4096)
        count.value = 4
        add = dispatch.adding(own, [own, *received])
        add()
        note("add", 1, [own.data_ptr(), add.arguments[1], own.data_ptr(), 4096])
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
