# SPDX-License-Identifier: Apache-2.0
"""What several commands print, as text: tables, clusters, what is gained or for codes, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.table import Table

from commrt.pricing.cluster import Cluster


def about(cluster: Cluster) -> str:
    """Return the line that says what is described."""
    return f"{cluster.name}: {' '.join(cluster.about.split())}"


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = 0
) -> Table:
    """Return a table of numbers, named by its first column; the row number `bold` stands out."""
    table = Table(title=title)
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == bold else None)
    return table


def gains(seconds: float, latency_s: float, digits: int) -> str:
    """Return in words what is saved of a time, and which part of it is latencies.

    >>> gains(0.003, 0.004, digits=0)
    '4 ms less for latencies and 1 ms more for bytes'
    """
    less_ms = {"latencies": 1e3 * latency_s, "bytes": 1e3 * (seconds - latency_s)}
    sides = [
        f"{abs(ms):.{digits}f} ms {'less' if ms >= 0 else 'more'} for {what}"
        for what, ms in less_ms.items()
    ]
    return " and ".join(sides)


def json_of(facts: object) -> str:
    """Return `facts` as JSON; numbers that are not finite become null.

    >>> json_of({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None))


def quantizer_sentence(seconds: float, cluster: Cluster) -> str:
    """Return what of the price is for turning values into codes and back."""
    if cluster.code_gbytes_per_s is None:
        return (
            f"quantizing is taken to need no time: {cluster.name} has no code_gbytes_per_s; commrt"
            " probe measures it"
        )
    return f"{1e3 * seconds:.3f} ms of it is for turning values into codes and back"
