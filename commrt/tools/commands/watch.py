# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor --watch``: a live table of a running job. On the thread of the command."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table

from commrt.tools.commands.output import json_of
from commrt.tools.measuring.live_job import Look, connect, end_of, looks


def watch(address: str, *, as_json: bool) -> None:
    """Show the job whose store is at `address` until it ends, and say how that is known.

    Where the output is no terminal, a table per look. With `as_json` a line of JSON per look, and
    the sentence on stderr.
    """
    store = connect(address)
    look = Look([], [])
    console = Console()
    if as_json:
        for look in looks(store):
            rows = [row._asdict() for row in look.rows]
            late = [each._asdict() for each in look.late]
            print(json_of({"ranks": rows, "late": late}), flush=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for look in looks(store):
                live.update(_table(look, address), refresh=True)
    else:
        for look in looks(store):
            console.print(_table(look, address))
    Console(stderr=as_json).print(end_of(look, address), soft_wrap=True)


def _table(look: Look, address: str) -> Table:
    title = f"commrt job at {address}"
    if not look.rows:
        title += ": no rank has written anything yet. Start the job with COMMRT_LIVE=1"
    table = Table("rank", "host", "step", "steps/s", "waits", "", title=title)
    for row in look.rows:
        rate = "" if row.steps_per_s is None else f"{row.steps_per_s:.3g}"
        share = "" if row.exposed is None else f"{100 * row.exposed:.0f} %"
        table.add_row(str(row.rank), row.host, str(row.step), rate, share, row.state)
    return table
