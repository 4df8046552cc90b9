# SPDX-License-Identifier: Apache-2.0
"""What happened when: ranges that Nsight shows, or a timeline that a browser does.

Ranges of one thread lie inside each other. What they cover is the host's time: on a GPU that of queueing, beside which
Nsight lays the time of the kernels themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Event", "Nvtx", "Recorder", "Timeline", "chrome_trace", "described", "within_range"]

DOMAIN = "commrt"
EVENTS_KEPT = 500_000
"""By a `Timeline`: about 270 MB."""

Fact = int | str
Event = dict[str, Any]
"""In Chrome's trace format."""


class Recorder(Protocol):
    """Who is told; by any thread."""

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """Something has begun on this thread."""
        ...

    def end(self) -> None:
        """What began last on this thread, and has not ended, has ended."""
        ...


class _Range:
    def __init__(self, recorder: Recorder, name: str, facts: dict[str, Fact]) -> None:
        self._recorder, self._name, self._facts = recorder, name, facts

    def __enter__(self) -> None:
        self._recorder.begin(self._name, self._facts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.end()


NOTHING: AbstractContextManager[None] = nullcontext()


def within_range(recorder: Recorder | None, name: str, **facts: Fact) -> AbstractContextManager[None]:
    """Tell `recorder`, if there is one, when the body begins and ends; without one it costs 0.3 us."""
    return NOTHING if recorder is None else _Range(recorder, name, facts)


def described(name: str, facts: dict[str, Fact]) -> str:
    """One line.

    >>> described("hop", {"number": 3, "to": "1, 2", "nbytes": 512})
    'hop: number 3, to 1, 2, nbytes 512'
    """
    return f"{name}: {', '.join(f'{key} {value}' for key, value in facts.items())}" if facts else name


class Nvtx:
    """Ranges in the domain ``commrt`` of Nsight Systems; costs 2 us each while no profiler listens.

    Raises `ImportError` without the package ``nvtx``.
    """

    def __init__(self) -> None:
        import nvtx  # noqa: PLC0415  # an extra

        self._domain = nvtx.get_domain(DOMAIN)

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """See `Recorder`; the training step or the bytes are the range's payload: each new message would be kept."""
        said = {key: value for key, value in facts.items() if key != "step"}
        payload = facts.get("nbytes", facts.get("step", 0))
        attributes = self._domain.get_event_attributes(message=described(name, said), category=name, payload=payload)
        self._domain.push_range(attributes)

    def end(self) -> None:
        """See `Recorder`."""
        self._domain.pop_range()


class Timeline:
    """All ranges of one rank, for `chrome_trace`; keeps the first `EVENTS_KEPT`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open = threading.local()
        self.events: list[Event] = []
        """In order of their ends; times are ``time.perf_counter``'s, one clock for all processes of a Linux host."""
        self.left_out = 0
        """How many more there were."""

    def begin(self, name: str, facts: dict[str, Fact]) -> None:
        """See `Recorder`."""
        stack = self._open.__dict__.setdefault("stack", [])
        stack.append((name, facts, perf_counter()))

    def end(self) -> None:
        """See `Recorder`."""
        end_s = perf_counter()
        name, facts, begin_s = self._open.stack.pop()
        if len(self.events) >= EVENTS_KEPT:
            self.left_out += 1
            return
        times = {"ts": round(begin_s * 1e6, 3), "dur": round((end_s - begin_s) * 1e6, 3)}
        where = {"pid": self._rank, "tid": threading.get_native_id(), "thread": threading.current_thread().name}
        self.events.append({"name": name, "ph": "X", **times, **where, "args": facts})


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """What ``chrome://tracing`` and ui.perfetto.dev open: a process per rank, a row per thread."""
    rows = list(events)
    threads = {(row["pid"], row["tid"]): row["thread"] for row in rows}
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in threads})
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        for (rank, thread), name in threads.items()
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + rows}
