# SPDX-License-Identifier: Apache-2.0
"""Memory that the processes of one host share: anonymous files, mapped by whoever was handed their descriptor.

Nothing has a name in a file system: a segment goes with the last process that maps it, however that one ends,
and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Arena", "Segment", "aligned", "mapped"]

SEGMENT_NBYTES = 32 << 20
"""Least size of a segment. Pages that were never touched cost nothing; a process may hold few descriptors."""
ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector access."""


class Segment(NamedTuple):
    """One anonymous file, mapped here."""

    number: int
    """Names it in this process; never used again."""
    fd: int
    addresses: range
    """Where it lies in this process."""


class Arena:
    """The segments of one rank. Tensors are cut from them in order; a segment dies with the last tensor on it.

    For any thread, and tensors may die on any.
    """

    def __init__(self) -> None:
        self.died: deque[int] = deque()
        """Numbers of segments that are no more; whoever tells the peers takes them out."""
        self._living: dict[int, Segment] = {}
        self._numbers = count(1)
        self._lock = Lock()
        self._memory: mmap.mmap | None = None  # what tensors are cut from now
        self._used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros [numel]."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        with self._lock:
            if self._memory is None or self._used + nbytes > len(self._memory):
                self._memory, self._used = self._segment(nbytes), 0
            start, self._used = self._used, aligned(self._used + nbytes)
            return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def covers(self, data: Tensor) -> bool:
        """True if `data` lies in a segment of this arena."""
        return self._around(data.data_ptr()) is not None

    def locate(self, data: Tensor) -> tuple[Segment, int]:
        """The segment that `data` lies in, and where in it, in bytes; LookupError if it is other memory."""
        segment = self._around(data.data_ptr())
        if segment is None:
            raise LookupError("not allocated here")
        return segment, data.data_ptr() - segment.addresses.start

    def _around(self, address: int) -> Segment | None:
        return next((one for one in tuple(self._living.values()) if address in one.addresses), None)

    def close(self) -> None:
        """Allocate from nothing any more; what was allocated stays usable."""
        self._memory = None

    def _segment(self, nbytes: int) -> mmap.mmap:
        number = next(self._numbers)
        fd = os.memfd_create(f"commrt-{number}")
        try:
            os.ftruncate(fd, max(nbytes, SEGMENT_NBYTES))
            memory = mmap.mmap(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._living[number] = Segment(number, fd, range(start, start + len(memory)))
        # Every tensor holds the mapping, so this runs when the last one has gone.
        weakref.finalize(memory, _bury, number, self._living, self.died).atexit = False
        return memory


def _bury(number: int, living: dict[int, Segment], died: deque[int]) -> None:
    os.close(living.pop(number).fd)
    died.append(number)


def aligned(nbytes: int) -> int:
    """`nbytes`, up to the next multiple of a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def mapped(fd: int) -> mmap.mmap:
    """Another process's segment; takes `fd` and closes it."""
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
