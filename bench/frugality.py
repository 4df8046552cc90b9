# SPDX-License-Identifier: Apache-2.0
"""What must not happen in a step: device memory asked for, and the host waiting."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from stopwatch import HAS_GPU

__all__ = ["allocations", "waiting_is_an_error"]


def allocations() -> int:
    """Of device memory so far."""
    return torch.cuda.memory_stats()["allocation.all.allocated"] if HAS_GPU else 0


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Torch raises where it would wait for the device."""
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
