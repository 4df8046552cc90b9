# SPDX-License-Identifier: Apache-2.0
"""Launch compiled kernels with little work per call: a kept handle, and plain integers for addresses.

Triton's own launch checks every argument, its alignment, the device and the options each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from commrt.kernels.device.variants import Variant, compiled
from commrt.kernels.layout import WIDEST_NBYTES

__all__ = ["Bound", "Launch", "arch_of", "launch_of", "require_aligned"]

Launch = Callable[..., None]
"""``launch(programs, *arguments)`` on the current stream of the kernel's device; addresses and numbers as integers."""


@cache
def arch_of(device: torch.device) -> int:
    """Return the compute capability of `device` as Triton writes it: 90 is 9.0."""
    major, minor = driver.active.get_device_capability(device.index)
    return int(major * 10 + minor)


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch whose arguments never change."""

    launch: Launch
    programs: int
    arguments: tuple[int, ...]
    memory: tuple[object, ...]
    """Objects at the addresses among the arguments, kept alive as long as this launch."""

    def __call__(self) -> None:
        """Launch it."""
        self.launch(self.programs, *self.arguments)


_loading = threading.Lock()


def launch_of(variant: Variant, device: torch.device) -> Launch:
    """Return the launch of `variant` on `device`, compiled and loaded once; it needs `device` as the current one."""
    with _loading, _on(device):  # Triton's handle is there before its code is loaded
        return _loaded(variant, device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the thread's current one while code is loaded."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _loaded(variant: Variant, device: torch.device) -> Launch:
    kernel = compiled(variant, arch_of(device))  # of this device alone: its code is loaded there
    run, index = kernel.run, device.index  # `run` loads the code and makes the launcher
    function, metadata = kernel.function, kernel.packed_metadata
    constants = tuple(value for _, value in variant.constants)
    current_stream: Callable[[int], Any] = driver.active.get_current_stream

    def launch(programs: int, *arguments: int) -> None:
        run(programs, 1, 1, current_stream(index), function, metadata, None, None, None, *arguments, *constants)

    return launch


def require_aligned(*buffers: Tensor) -> None:
    """Raise `ValueError` for a buffer that does not begin at a multiple of 16 bytes, as the kernels are told."""
    for address in (buffer.data_ptr() for buffer in buffers):
        if address % WIDEST_NBYTES:
            raise ValueError(
                f"a buffer on a GPU begins at {address:#x}, which is no multiple of {WIDEST_NBYTES} bytes: pass one "
                "that is not a view into the middle of another, or its clone()"
            )
