# SPDX-License-Identifier: Apache-2.0
"""Ranges of time, for torch's profiler, Nsight Systems or a timeline in a browser.

Recorders write down what they are told, on the thread that tells it, and touch nothing else. Ranges
of one thread are nested. They cover host time: on a GPU, the time to queue the work. Nsight
Systems shows the time of the kernels beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol

from torch._C._profiler import _RecordFunctionFast

DOMAIN = "commrt"
EVENTS_KEPT = 500_000
"""Ranges that a `Timeline` keeps: about 270 MB."""

Fact = int | str
Event = dict[str, Any]
"""A range in Chrome's trace format."""


class Recorder(Protocol):
    """Receives the beginning and the end of each range, from any thread."""

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """Begin a range on the calling thread."""

    def end(self) -> None:
        """End the calling thread's innermost range."""


@contextmanager
def _range(recorder: Recorder, name: str, facts: dict[str, Fact]) -> Iterator[None]:
    recorder.begin(name, facts)
    try:
        yield
    finally:
        recorder.end()


NOTHING: AbstractContextManager[None] = nullcontext()


def within_range(
    recorder: Recorder | None, name: str, **facts: Fact
) -> AbstractContextManager[None]:
    """Record the body as a range, if there is a `recorder`."""
    return NOTHING if recorder is None else _range(recorder, name, facts)


class Nvtx:
    """Records ranges in Nsight's domain ``commrt`` by nvtx, or `ImportError`; 2 us each unheard."""

    def __init__(self) -> None:
        import nvtx  # noqa: PLC0415  # an extra

        self._domain = nvtx.get_domain(DOMAIN)

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """See `Recorder`.

        The step or the bytes are the payload, since NVTX would keep each new message.
        """
        payload = facts.get("nbytes", facts.get("step", 0))
        attributes = self._domain.get_event_attributes(
            message=_message(name, facts), category=name, payload=payload
        )
        self._domain.push_range(attributes)

    def end(self) -> None:
        """See `Recorder`."""
        self._domain.pop_range()


def _message(name: str, facts: dict[str, Fact]) -> str:
    """Return `name` and all `facts` but the step, with which each message would be new."""
    text = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "step")
    return f"{name}: {text}" if text else name


class TorchProfiler:
    """Records ranges for torch's profiler, named like ``commrt::bucket: number 0, algorithm ring``.

    The profiler shows those of the thread that started it, and of all threads if it was told so
    (docs/observe.md).
    """

    def __init__(self) -> None:
        self._open = threading.local()

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """See `Recorder`.

        The name has the facts, as torch shows other arguments of one thread only.
        """
        begun = _RecordFunctionFast(f"{DOMAIN}::{_message(name, facts)}")
        begun.__enter__()
        self._open.__dict__.setdefault("stack", []).append(begun)

    def end(self) -> None:
        """See `Recorder`."""
        self._open.stack.pop().__exit__(None, None, None)


TORCH = TorchProfiler()


class Timeline:
    """Keeps the first `EVENTS_KEPT` ranges of one rank, for `chrome_trace`.

    All threads that communicate write; read it when none does.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open = threading.local()
        self.events: list[Event] = []
        """In order of their ends.

        Times are ``time.perf_counter``'s, one clock for all processes of a Linux host.
        """
        self.left_out = 0
        """The number of ranges that were not kept."""

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """See `Recorder`."""
        self._open.__dict__.setdefault("stack", []).append((name, facts, perf_counter()))

    def end(self) -> None:
        """See `Recorder`."""
        end_s = perf_counter()
        name, facts, begin_s = self._open.stack.pop()
        if len(self.events) >= EVENTS_KEPT:
            self.left_out += 1
            return
        times = {"ts": round(begin_s * 1e6, 3), "dur": round((end_s - begin_s) * 1e6, 3)}
        where = {
            "pid": self._rank,
            "tid": threading.get_native_id(),
            "thread": threading.current_thread().name,
        }
        self.events.append({"name": name, "ph": "X", **times, **where, "args": facts})
