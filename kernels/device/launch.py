# SPDX-License-Identifier: Apache-2.0
"""Launches of compiled kernels: a kept handle, plain integers for addresses, and nothing else per call.

Triton's own way to launch looks at every argument, its alignment, the device and the options each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.runtime import driver

from commrt.kernels.device.variants import Variant, compiled

__all__ = ["Bound", "Launch", "arch_of", "launch_of"]

Launch = Callable[..., None]
"""``launch(programs, *arguments)`` on the current stream of the kernel's device; addresses and numbers as integers."""


@cache
def arch_of(device: torch.device) -> int:
    """The compute capability of `device` as Triton counts: 90 is 9.0."""
    major, minor = driver.active.get_device_capability(device.index)
    return int(major * 10 + minor)


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch whose arguments never change."""

    launch: Launch
    programs: int
    arguments: tuple[int, ...]
    memory: tuple[object, ...]
    """What lies at the addresses among the arguments, kept as long as this."""

    def __call__(self) -> None:
        """Launch it."""
        self.launch(self.programs, *self.arguments)


@cache
def launch_of(variant: Variant, device: torch.device) -> Launch:
    """How to launch `variant` on `device`, which must be the current one; compiles, loads, and keeps it."""
    kernel = compiled(variant, arch_of(device))
    run, index = kernel.run, device.index  # `run` loads the code and makes the launcher
    function, metadata = kernel.function, kernel.packed_metadata
    constants = tuple(value for _, value in variant.constants)
    current_stream: Callable[[int], Any] = driver.active.get_current_stream

    def launch(programs: int, *arguments: int) -> None:
        run(programs, 1, 1, current_stream(index), function, metadata, None, None, None, *arguments, *constants)

    return launch
