# SPDX-License-Identifier: Apache-2.0
"""A stand-in for memory that GPUs of one host map, on host memory, between threads of one process.

It keeps CUDA's rules: a process does not open its own segment, nor one that is freed, and closes what it has opened
once. A rank waits on the calling thread.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from nccl_stand_in import ask
from torch import Tensor

from commrt.kernels.signal_wait import ABORT, BACK, ENDED, FAILED, MOST_RANKS, TIMEOUT_NS, SignalWaitPlan
from commrt.threads.deadline import clock
from commrt.transport.ipc import IpcMemory

PAUSE_S = 0.0001


class HostIpcMemory(IpcMemory):
    """A `IpcMemory` of one rank, in host memory; all ranks of a process share `segments`."""

    segments: ClassVar[WeakValueDictionary[bytes, Any]] = WeakValueDictionary()
    _numbers = count()

    def __init__(self) -> None:
        self._own, self._opened = set[bytes](), dict[int, bytes]()

    @property
    def mapped(self) -> int:
        """Segments of peers that this rank has opened and not closed."""
        return len(self._opened)

    @property
    def allocated(self) -> int:
        """Segments of this rank that have a handle and are not freed."""
        return sum(handle in self.segments for handle in self._own)

    def allocate(self, nbytes: int) -> Any:
        """See `IpcMemory.allocate`; a segment begins at a multiple of 256 bytes, as on a GPU."""
        memory = np.zeros(nbytes + 256, np.uint8)
        begin = -memory.ctypes.data % 256
        return memory[begin : begin + nbytes]

    def again(self, segment: Any) -> Any:
        return segment[:]

    def handle(self, segment: Any) -> bytes:
        handle = b"%d" % next(self._numbers)
        self.segments[handle] = segment
        self._own.add(handle)
        return handle

    def open(self, handle: bytes, nbytes: int) -> Any:
        if handle in self._own:
            raise RuntimeError("cudaErrorDeviceUninitialized: invalid device context")
        segment = self.segments.get(handle)
        if segment is None:
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        if segment.nbytes != nbytes:
            raise RuntimeError(f"the segment has {segment.nbytes} bytes, not {nbytes}")
        mapping = segment[:]
        self._opened[id(mapping)] = handle
        return mapping

    def close(self, segment: Any) -> None:
        """See `IpcMemory.close`; raises `KeyError` for one that is not open."""
        del self._opened[id(segment)]

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def signal_wait(self, plan: SignalWaitPlan) -> Callable[[], None]:
        """See `IpcMemory.signal_wait`; a thread that records a graph does it in each replay."""
        return lambda: ask(lambda: run(plan))

    def synchronize(self) -> None:
        """Return at once: nothing is queued."""


def run(plan: SignalWaitPlan) -> None:
    for waits in signal_wait(plan):
        if waits:
            threading.Event().wait(PAUSE_S)


def signal_wait(plan: SignalWaitPlan) -> Iterator[bool]:
    """Signal and wait in steps, each of which reads or writes one word; yields True while it waits for a peer.

    This defines what `signal_wait_kernel` does.
    """
    if plan.state[0]:
        return
    peers = range(len(plan.needs))
    for place in peers:
        if _is_back(plan, place):
            yield from _fail(plan, place)
            return
        yield False
    if plan.checks_abort and plan.host[ABORT]:
        yield from _fail(plan, 0)
        return
    for place in peers:
        _write(plan.outboxes[place], int(plan.counts[place]) + plan.position)
        yield False
    deadline_s = clock.now_s() + plan.host[TIMEOUT_NS].item() * 1e-9
    for place, need in enumerate(plan.needs):
        while need and _difference(int(plan.inboxes[place]), int(plan.counts[place]) + need) < 0:
            if plan.host[ABORT] or clock.now_s() > deadline_s:
                yield from _fail(plan, place)
                return
            yield True
        yield False
    if plan.last:
        _end(plan)


def _end(plan: SignalWaitPlan) -> None:
    for begin in plan.counts:
        _write(begin, int(begin) + plan.last)
    plan.state[1] += 1
    plan.host[ENDED] = plan.state[1]


def _is_back(plan: SignalWaitPlan, place: int) -> bool:
    return _difference(int(plan.inboxes[place]), int(plan.counts[place])) < -BACK // 2


def _fail(plan: SignalWaitPlan, place: int) -> Iterator[bool]:
    plan.state[0] = 1
    plan.host[FAILED] = plan.number * MOST_RANKS + plan.ranks[place] + 1
    for outbox, begin in zip(plan.outboxes, plan.counts, strict=True):
        _write(outbox, int(begin) - BACK)
        yield False


def _write(word: Tensor, position: int) -> None:
    word.fill_(ctypes.c_int32(position).value)


def _difference(one: int, other: int) -> int:
    return ctypes.c_int32(one - other).value
