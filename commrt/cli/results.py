# SPDX-License-Identifier: Apache-2.0
"""What ``commrt train`` says of its runs, as rows of words; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from commrt.cli.job import Result
from commrt.cli.recipes import PLAIN

__all__ = ["rows", "title"]

ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("test accuracy", lambda r: f"{r.test_accuracy:.1%}"),
    ("images/s", lambda r: f"{r.images_per_second:,.0f}"),
    ("step time", lambda r: f"{r.step_seconds * 1e3:.2f} ms"),
    ("waited in a step", lambda r: f"{r.exposed_comm_seconds * 1e3:.2f} ms"),
    ("communication in all", lambda r: "-" if r.comm_seconds is None else f"{r.comm_seconds * 1e3:.2f} ms"),
    ("sent per rank and step", lambda r: "-" if r.bytes_sent_per_step is None else f"{r.bytes_sent_per_step:,} B"),
    ("replicas apart before the end", lambda r: f"{r.disagreement:.2g}"),
    ("bitwise equal at the end", lambda r: "yes" if r.replicas_equal else "NO"),
)
LATE_ROW: tuple[str, Callable[[Result], str]] = (
    "gradients too late",
    lambda r: ", ".join(f"rank {rank}: {late}" for rank, late in r.late.items() if late) or "none",
)
SAVED_ROW: tuple[str, Callable[[Result], str]] = ("not waited for them", lambda r: f"{r.saved_seconds:.1f} s")
LOST_ROW: tuple[str, Callable[[Result], str]] = ("workers lost", lambda r: ", ".join(map(str, r.lost)) or "none")


def title(results: Sequence[Result]) -> str:
    """What all of them have in common."""
    first = results[0]
    recipe = f", recipe {first.recipe}" if first.recipe != PLAIN else ""
    return f"{first.workers} worker{'s' * (first.workers > 1)}, {first.steps} steps, {first.wire} wire{recipe}"


def rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """A name, then what each has."""
    shown = [*ROWS]
    shown += [LATE_ROW, SAVED_ROW] if any(any(result.late.values()) for result in results) else []
    shown += [LOST_ROW] if any(result.lost for result in results) else []
    for name, cell in shown:
        yield name, *(cell(result) for result in results)
