# SPDX-License-Identifier: Apache-2.0
"""Notice what must not happen in a step: allocations of device memory, and waits of the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gpu_timer import HAS_GPU

__all__ = ["allocations", "waiting_is_an_error"]


def allocations() -> int:
    """Return the number of allocations of device memory so far."""
    return torch.cuda.memory_stats()["allocation.all.allocated"] if HAS_GPU else 0


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let torch raise where it would wait for the device."""
    if not HAS_GPU:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
