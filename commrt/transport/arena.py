# SPDX-License-Identifier: Apache-2.0
"""Shared memory of one rank: segments that processes of its host can map, and tensors in them.

Any thread may allocate, find a tensor's segment, and let go of the last tensor of one. Knows no
ranks: `freed` says what a transport must tell them.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEEP_NO_FILE: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Without this, a mapping opens its file once more, for as long as it lives."""
SEGMENT_NBYTES = 32 << 20
"""Least size of a segment: untouched pages cost nothing, and a process may open few files."""
ALIGNMENT_NBYTES = 64
"""A cache line, and the widest vector access."""


class Segment(NamedTuple):
    """One anonymous file, mapped in this process."""

    number: int
    """Identifies it in this process; never reused."""
    fd: int
    addresses: range


class Arena:
    """Allocates tensors from one rank's segments, each freed with its last tensor. Thread-safe."""

    def __init__(self) -> None:
        self.freed: deque[int] = deque()
        """Numbers of freed segments, appended by whichever thread lets go of the last tensor.

        `SharedTransport` takes them out, before an exchange, and tells the peers.
        """
        self._segments: dict[int, Segment] = {}  # by number, until `_free`
        self._numbers = count(1)
        self._lock = Lock()
        # the segment that new tensors are cut from, and its bytes that are taken; under the lock
        self._memory: mmap.mmap | None = None
        self._used = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [numel]."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        with self._lock:
            if self._memory is None or self._used + nbytes > len(self._memory):
                self._memory = self._new_segment(nbytes)
                self._used = 0
            start = self._used
            self._used = aligned(self._used + nbytes)
            return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        """Return the segment with `data` and the offset in bytes, or None for other memory."""
        address = data.data_ptr()
        segment = next(
            (each for each in tuple(self._segments.values()) if address in each.addresses), None
        )
        return None if segment is None else (segment, address - segment.addresses.start)

    def _new_segment(self, nbytes: int) -> mmap.mmap:
        number = next(self._numbers)
        fd = os.memfd_create(f"commrt-{number}")
        try:
            os.ftruncate(fd, max(nbytes, SEGMENT_NBYTES))
            memory = mmap.mmap(fd, 0, **KEEP_NO_FILE)
        except BaseException:
            os.close(fd)
            raise
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._segments[number] = Segment(number, fd, range(start, start + len(memory)))
        # Each tensor references the mapping: this runs, on any thread, once the last is gone.
        weakref.finalize(memory, _free, number, self._segments, self.freed).atexit = False
        return memory


def _free(number: int, segments: dict[int, Segment], freed: deque[int]) -> None:
    """Close a segment; takes no lock, as garbage is collected anywhere, also in `allocate`."""
    os.close(segments.pop(number).fd)
    freed.append(number)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT_NBYTES`."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
