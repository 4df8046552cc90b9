# SPDX-License-Identifier: Apache-2.0
"""The streams of a GPU, as a thread uses them.

On a GPU a call returns once its work is queued on the calling thread's current stream. On a CPU
work is done when its call returns, so streams and events do nothing there.

Sets the calling thread's current device and stream, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from commrt.threads.graph_capture import capture


class StreamEvent:
    """A place in a stream.

    This class is a CPU's, always reached; a GPU's is a ``torch.cuda.Event``.
    """

    def query(self) -> bool:
        """Return True if all work before the event is done. Never waits."""
        return True

    def synchronize(self) -> None:
        """Wait on the host until all work before the event is done."""


DONE = StreamEvent()


class Streams:
    """The streams of one device, as the calling thread uses them.

    This class is a CPU's, which queues nothing.
    """

    queues = False
    """True if a call returns before its work is done."""

    def use(self) -> None:
        """Make the device the thread's current one."""

    def enter(self) -> None:
        """`use` the device, and make its main and side stream; the main one is current now."""

    def current(self) -> int:
        """Return the thread's current stream as C libraries take it; 0 is the default stream."""
        return 0

    def record_event(self) -> StreamEvent:
        """Return the event at the end of what is queued on the thread's current stream now."""
        return DONE

    def wait_event(self, event: StreamEvent) -> None:
        """Let all work that the thread queues from now on begin after `event`.

        The thread itself does not wait.
        """

    def main_stream(self) -> AbstractContextManager[object]:
        """Make the main stream current in the body; any thread may, once one has called `enter`."""
        return nullcontext()

    def side_stream(self) -> AbstractContextManager[object]:
        """Make the side stream current in the body; any thread may, once one has called `enter`."""
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return a graph of what `work` queues, without doing it; None on a CPU.

        `work` only queues: it must not allocate or wait. Meanwhile no other thread may use the
        device's random numbers, since torch would take its call for a part of the graph.
        """
        return None


HOST = Streams()


class CudaStreams(Streams):
    """The streams of one GPU.

    They have a high priority: their blocks run first where there is no room for all. One thread
    calls `enter`, before any uses the main or side stream; all else is for any thread. Where a
    graph is captured, see `graph_capture`.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # of the thread that has called `enter`
        self._main: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        # by handle, and only added to: making the object takes longer than using it
        self._seen: dict[int, torch.cuda.Stream] = {}

    def use(self) -> None:
        torch.cuda.set_device(self._device)

    def enter(self) -> None:
        self.use()
        self._main, self._side = (torch.cuda.Stream(self._device, priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._main)

    def current(self) -> int:
        # torch.cuda.current_stream() makes an object per call; Triton calls this function too
        handle: int = torch._C._cuda_getCurrentRawStream(self._device.index)  # noqa: SLF001
        return handle

    def record_event(self) -> StreamEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._current())
        return cast("StreamEvent", event)

    def wait_event(self, event: StreamEvent) -> None:
        if event is not DONE:
            self._current().wait_event(cast("torch.cuda.Event", event))

    def _current(self) -> torch.cuda.Stream:
        handle = self.current()
        if handle not in self._seen:
            self._seen[handle] = torch.cuda.current_stream(self._device)
        return self._seen[handle]

    def main_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._main)

    def side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._side)

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        return capture(self._device, work)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of `device`, which must have an index if it is a GPU."""
    return CudaStreams(device) if device.type == "cuda" else HOST
