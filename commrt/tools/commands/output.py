# SPDX-License-Identifier: Apache-2.0
"""Tables and JSON for what commands print; knows nothing of what stands in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.table import Table


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


def json_of(facts: object) -> str:
    """Return `facts` as JSON; numbers that are not finite become null.

    >>> json_of({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None))
