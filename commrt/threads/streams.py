# SPDX-License-Identifier: Apache-2.0
"""Where the work of a device is queued, and how far it has come.

On a GPU a call returns when its work is queued on the calling thread's current stream; a mark is a place in that queue.
On a CPU work is done when its call returns, and all of this is nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch

__all__ = ["DONE", "CudaStreams", "Graph", "HostStreams", "Mark", "Streams", "streams_of"]


class Mark(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """True if all before it is done; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until it is."""
        ...


class Graph(Protocol):
    """Work that a device remembers."""

    def replay(self) -> None:
        """Queue it on the thread's current stream."""
        ...

    def reset(self) -> None:
        """Forget it, if it is running, when it has ended; never waits."""
        ...


class Streams(Protocol):
    """The queues of one device, as the calling thread sees them."""

    queues: bool
    """False if work is done when its call returns."""

    def use(self) -> None:
        """Make the device the thread's current one."""
        ...

    def enter(self) -> None:
        """`use` it, and make a stream of its own the thread's current stream."""
        ...

    def current(self) -> int:
        """The handle of the thread's current stream, as C libraries take it."""
        ...

    def mark(self) -> Mark:
        """The end of what is queued on the thread's current stream now."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is queued on the thread's current stream from now on begins when `mark` is reached; never waits."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """What is queued in the body goes to a second stream of the thread that called `enter`."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """Remember what `work` queues, without doing it; None if that cannot be.

        `work` only queues: it neither allocates nor waits. Meanwhile no other thread may use the device's random
        numbers: torch would take its call for a part of the graph.
        """
        ...


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


DONE: Mark = _Done()
"""Behind all that is done already."""


class HostStreams:
    """A CPU, which queues nothing."""

    queues = False

    def use(self) -> None:
        """There is one device."""

    def enter(self) -> None:
        """It has no streams."""

    def current(self) -> int:
        """NCCL's word for the default stream."""
        return 0

    def mark(self) -> Mark:
        """Nothing is queued."""
        return DONE

    def follow(self, mark: Mark) -> None:
        """It is reached."""

    def aside(self) -> AbstractContextManager[object]:
        """It is done at once."""
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Graph | None:  # nothing is done with it
        """Nothing is queued."""
        return None


class CudaStreams:
    """One GPU; its own streams go before others where blocks of both wait for room."""

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._second: torch.cuda.Stream | None = None

    def use(self) -> None:
        """See `Streams.use`."""
        torch.cuda.set_device(self._device)

    def enter(self) -> None:
        """See `Streams.enter`; each call makes streams."""
        self.use()
        first, self._second = (self._stream() for _ in range(2))
        torch.cuda.set_stream(first)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def current(self) -> int:
        """What Triton asks too; ``torch.cuda.current_stream`` would make an object."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # noqa: SLF001
        return handle

    def mark(self) -> Mark:
        """An event without a time."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return cast("Mark", event)

    def follow(self, mark: Mark) -> None:
        """See `Streams.follow`."""
        if mark is not DONE:
            torch.cuda.current_stream(self._device).wait_event(cast("torch.cuda.Event", mark))

    def aside(self) -> AbstractContextManager[object]:
        """See `Streams.aside`."""
        return torch.cuda.stream(self._second)

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """See `Streams.capture`: a CUDA graph. Other threads may allocate meanwhile; nothing is collected."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with _uncollected():  # what a collector frees would end the capture (triton#10712)
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    self._end(graph, pool)
                raise
            self._end(graph, pool)
        return cast("Graph", graph)

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._recover(pool)
            raise

    def _recover(self, pool: Any) -> None:
        """Where CUDA has ended a capture, torch stays in it: its allocator, and the random numbers of the device."""
        for leave in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # noqa: SLF001
            with suppress(RuntimeError):  # done already
                leave(self._device.index, pool)
        again = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            again.capture_begin(capture_error_mode="thread_local")
            again.capture_end()


@contextmanager
def _uncollected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def streams_of(device: torch.device) -> Streams:
    """Those of `device`, which has an index if it is a GPU."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
