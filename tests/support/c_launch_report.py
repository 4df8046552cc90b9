# SPDX-License-Identifier: Apache-2.0
"""What arrives at the driver's library through Triton's own launcher in C, as JSON.

That library is `stub_cuda.c`. Kernels are compiled as for a real GPU, so this needs a process in
which Triton does not interpret.
"""

import ctypes
import json
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from commrt.kernels import dispatch
from commrt.kernels.layout import layout_of

HEADER = 0xF000_0000_0000_0005
STREAM = 7


class Noted(ctypes.Structure):
    """As in `stub_cuda.c`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("launches", "programs", "threads", "stream")),
        ("arguments", ctypes.c_uint64 * 16),
    )


class Loads:
    """What loads code, and knows limits: it counts, and loads nothing."""

    def __init__(self) -> None:
        self.count = 0

    def load_binary(self, *code: object) -> tuple[object, int, int, int, int]:
        """Return the module, the function, and its registers, spills and most threads."""
        self.count += 1
        return object(), self.count, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return what Triton asks of them."""
        return {"max_shared_mem": 1 << 17}


library = ctypes.CDLL("libcuda.so.1")
ctypes.c_int.in_dll(library, "argument_count").value = 10
loads = Loads()
utils: object = loads
if "launch" in CudaUtils.__init__.__code__.co_names:  # in a kernel's own launcher before Triton 3.7
    utils = CudaUtils()
    utils.load_binary = loads.load_binary
    utils.get_device_properties = loads.get_device_properties
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: STREAM,
        get_device_capability=lambda device: (9, 0),  # an H200
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=CudaLauncher,
        utils=utils,
    )
)
dispatch.is_on_gpu = lambda tensor: True
tensors = [torch.zeros(5), torch.zeros(50_000)]
layout = layout_of([5, 50_000])
wire = torch.zeros(layout.numel, dtype=torch.bfloat16)
packing, _ = (dispatch.packing(wire, layout, tensors) for _ in range(2))
packing.pack(tensors, 0.5, HEADER)
columns = [column.data_ptr() for column in packing.tables.columns]
arguments = [*columns, wire.data_ptr(), HEADER, packing._scale.at(0.5), 0, 0]
noted = Noted.in_dll(library, "noted")
arrived = [loads.count, noted.launches, noted.programs, noted.stream, *noted.arguments[:10]]
expected = [6, 1, 14, STREAM, *arguments]  # three alignments, two ways
sys.stdout.write(json.dumps({"arrived": arrived, "expected": expected}))
