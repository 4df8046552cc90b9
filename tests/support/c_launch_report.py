# SPDX-License-Identifier: Apache-2.0
"""What arrives at the driver's library through Triton's own launcher in C, as JSON; `stub_cuda.c` is that library."""

from __future__ import annotations

import ctypes
import json
import sys
from types import SimpleNamespace

import torch
from fake_gpu import STREAM, Driver, fake_gpu
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


library = ctypes.CDLL("libcuda.so.1")
ctypes.c_int.in_dll(library, "argument_count").value = 10
fake_utils = Driver.utils.fget(Driver())
if "launch" in CudaUtils.__init__.__code__.co_names:  # in a kernel's own launcher before Triton 3.7
    fake_utils = SimpleNamespace(**{**vars(CudaUtils()), **vars(fake_utils)})
Driver.launcher_cls = staticmethod(CudaLauncher)
Driver.utils = fake_utils
with fake_gpu():
    tensors = [torch.zeros(5), torch.zeros(50_000)]
    layout = layout_of([5, 50_000])
    wire = torch.zeros(layout.numel, dtype=torch.bfloat16)
    packing = dispatch.packing(wire, layout, tensors)
    packing.pack(tensors, 0.5, HEADER)
    columns = [column.data_ptr() for column in packing.tables.columns]
    arguments = [*columns, wire.data_ptr(), HEADER, packing._scale.at(0.5), 0, 0]
noted = Noted.in_dll(library, "noted")
arrived = [noted.launches, noted.programs, noted.stream, *noted.arguments[:10]]
sys.stdout.write(json.dumps({"arrived": arrived, "expected": [1, 14, STREAM, *arguments]}))
