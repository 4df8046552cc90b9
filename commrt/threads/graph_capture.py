# SPDX-License-Identifier: Apache-2.0
"""Captures what a thread queues on a GPU as a graph.

On the thread that queues the work. Python's garbage collector stands still meanwhile, for all
threads. It brings torch out of a capture that failed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def capture(device: torch.device, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of what `work` queues on the current stream of `device`, without doing it.

    Other threads may allocate meanwhile. Raises what `work` raises, and `RuntimeError` if it does
    what cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    collects = gc.isenabled()
    gc.disable()  # what the garbage collector frees would end the capture (triton#10712)
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the first error says why
                _end(graph, device, pool)
            raise
        _end(graph, device, pool)
    finally:
        if collects:
            gc.enable()
    return graph


def _end(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        _leave_capture(device, pool)
        raise


def _leave_capture(device: torch.device, pool: Any) -> None:
    """Bring torch out of a capture that CUDA ended: its allocator, then its random numbers."""
    for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # noqa: SLF001
        with suppress(RuntimeError):  # it was done already
            leave(device.index, pool)
    # the generator of random numbers is set back where a capture begins and ends
    another = torch.cuda.CUDAGraph()
    with suppress(RuntimeError):
        another.capture_begin(capture_error_mode="thread_local")
        another.capture_end()
