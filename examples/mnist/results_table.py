# SPDX-License-Identifier: Apache-2.0
"""The table that compares runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from result import Result
from rich.table import Table

__all__ = ["heading", "results_table"]

Row = tuple[str, Callable[[Result], str]]
ROWS: tuple[Row, ...] = (
    ("test accuracy", lambda r: f"{r.test_accuracy:.1%}"),
    ("images/s", lambda r: f"{r.images_per_second:,.0f}"),
    ("step time", lambda r: f"{r.step_seconds * 1e3:.2f} ms"),
    ("waited in a step", lambda r: f"{r.exposed_comm_seconds * 1e3:.2f} ms"),
    (
        "communication in all",
        lambda r: "-" if r.comm_seconds is None else f"{r.comm_seconds * 1e3:.2f} ms",
    ),
    (
        "sent per rank and step",
        lambda r: "-" if r.bytes_sent_per_step is None else f"{r.bytes_sent_per_step:,} B",
    ),
    ("replicas apart before the end", lambda r: f"{r.disagreement:.2g}"),
    ("bitwise equal at the end", lambda r: "yes" if r.replicas_equal else "NO"),
)
LATE_ROWS: tuple[Row, ...] = (
    (
        "gradients too late",
        lambda r: ", ".join(f"rank {rank}: {n}" for rank, n in r.late.items() if n) or "none",
    ),
    ("not waited for them", lambda r: f"{r.saved_seconds:.1f} s"),
)
LOST_ROWS: tuple[Row, ...] = (
    ("lost workers", lambda r: ", ".join(f"rank {rank}" for rank in r.lost) or "none"),
)


def _title(results: Sequence[Result]) -> str:
    """Return what all runs have in common, as one line."""
    first = results[0]
    recipe = "" if first.recipe == "plain" else f", recipe {first.recipe}"
    return (
        f"{first.workers} worker{'s' * (first.workers > 1)}, {first.steps} steps, {first.wire}"
        f" wire{recipe}"
    )


def heading(result: Result, first: Result) -> str:
    """Return the algorithm, and the wire if it is not that of the first run."""
    return (
        result.algorithm if result.wire == first.wire else f"{result.algorithm}, {result.wire} wire"
    )


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Return the rows of the table: a name, then one cell per run."""
    late_rows = LATE_ROWS if any(any(result.late.values()) for result in results) else ()
    lost_rows = LOST_ROWS if any(result.lost for result in results) else ()
    for name, cell in (*ROWS, *late_rows, *lost_rows):
        yield name, *(cell(result) for result in results)


def results_table(results: Sequence[Result]) -> Table:
    """Return the table for the terminal, one column per run."""
    table = Table("", title=_title(results))
    for result in results:
        table.add_column(heading(result, results[0]), justify="right")
    for row in _rows(results):
        table.add_row(*row)
    return table
