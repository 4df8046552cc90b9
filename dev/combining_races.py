# SPDX-License-Identifier: Apache-2.0
"""Find bytes that an exchange and a combination beside it both touch, in no order, when an executor
runs a program.

The search knows nothing of chunks. It notes which bytes each exchange and each combination reads
and writes, and on which of two streams. Two accesses to one byte race if one of them writes, and no
stream waits for the other in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from commrt.program import program
from commrt.runtime import executor
from commrt.runtime.executor import BoundProgram, bind
from commrt.schedule import Schedule
from commrt.transport.protocol import Tag

Access = tuple[int, int, int, int, int, bool]
"""Stream, ticks of both streams that are known to be over, first byte, byte after the last, whether
it writes.
"""


class TwoStreams:
    """Two streams that note what is queued where, and who waits for whom."""

    queues = True

    def __init__(self) -> None:
        self.now = 0
        self.clocks = [(0, 0), (0, 0)]
        self.accesses: list[Access] = []

    def record_event(self) -> tuple[int, int]:
        """Return what is over once the current stream is so far."""
        return self.clocks[self.now]

    def wait_event(self, mark: tuple[int, int]) -> None:
        """Let the current stream wait for a mark."""
        one, other = self.clocks[self.now]
        self.clocks[self.now] = max(one, mark[0]), max(other, mark[1])

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Queue on the second stream."""
        self.now = 1
        yield
        self.now = 0

    def touch(self, tensor: Tensor, writes: bool) -> None:
        """Note an access of the work that the current stream queues."""
        if tensor.numel():
            begin = tensor.data_ptr()
            self.accesses.append(
                (self.now, *self.clocks[self.now], begin, begin + tensor.nbytes, writes)
            )

    def step(self) -> None:
        """End a piece of work on the current stream."""
        clock = list(self.clocks[self.now])
        clock[self.now] += 1
        self.clocks[self.now] = clock[0], clock[1]


def races(streams: TwoStreams) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return pairs of ranges of bytes that are accessed in no order, one of them by a write."""
    if not streams.accesses:
        return []
    stream, *clocks, begin, end, writes = np.array(streams.accesses).T
    known = np.stack(clocks)
    own = known[stream, np.arange(len(stream))]
    ordered = (stream[:, None] == stream) | (known[stream] > own[:, None])  # [earlier, later]
    overlap = (begin[:, None] < end) & (begin < end[:, None])
    racing = np.triu(overlap & ~ordered & ((writes[:, None] | writes) == 1), 1)
    spans = [*zip(begin.tolist(), end.tolist(), strict=True)]
    return [(spans[one], spans[other]) for one, other in np.argwhere(racing).tolist()]


class Noted:
    """A transport that notes what is read and written; nothing moves."""

    def __init__(self, streams: TwoStreams) -> None:
        self._streams = streams

    def bind(self, group: Any) -> Callable[[Tag], None]:
        """Return the exchange of a group."""

        def exchange(_: Tag) -> None:
            for message in group.sends:
                self._streams.touch(message.data, writes=False)
            for message in group.recvs:
                self._streams.touch(message.data, writes=True)
            self._streams.step()

        return exchange


def run_noted(
    schedule: Schedule, rank: int, streams: TwoStreams, numel: int = 4096
) -> BoundProgram:
    """Run a rank's program on `streams`, and return it."""

    def combination(out: Tensor, *operands: Tensor) -> Callable[[], None]:
        def combine() -> None:
            streams.touch(out, writes=True)
            for part in operands:
                streams.touch(part, writes=False)
            streams.step()

        return combine

    with (
        patch.object(executor, "adding", lambda out, summands: combination(out, *summands)),
        patch.object(executor, "mixing", lambda out, received, _: combination(out, received)),
    ):
        bound = bind(program(schedule, rank), torch.zeros(numel), Noted(streams), streams=streams)
        bound.run(Tag(0, 0))
    return bound
