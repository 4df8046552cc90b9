# SPDX-License-Identifier: Apache-2.0
"""The program ``commrt``: its commands, its errors in one line on standard error, its exit codes.

`main` runs programs of studies and examples too, lets standard output write any name of a file, and
ends the process after an error. Importing it needs no torch: what looks at a
machine imports it when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

import commrt
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.tools.commands import draw, plan, simulate, verify
from commrt.tools.commands.machine import doctor, probe
from commrt.tools.commands.plan_collective import collective
from commrt.tools.commands.simulate_backups import backups
from commrt.tools.commands.simulate_local import local
from commrt.tools.commands.spreading import spread

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

PRICE = "Prove, price and draw"
MACHINE = "Look at a machine"
MAX_CHARACTERS = 1500
"""Most characters of an error message."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"commrt {commrt.__version__}")
        raise typer.Exit


@app.callback()
def commrt_(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Data-parallel training with collectives that attach and all_reduce prove before they run.

    Exit codes: 0 success, 1 runtime failure, 2 invalid input, 130 interrupted.
    """


def _group(name: str, about: str, commands: dict[str, Callable[..., None]]) -> None:
    group = typer.Typer(no_args_is_help=True, help=about)
    for each, command in commands.items():
        group.command(each)(spread(command))
    app.add_typer(group, name=name, rich_help_panel=PRICE)


app.command(rich_help_panel=PRICE)(spread(verify.verify))
_group(
    "simulate",
    "Estimate an exchange or a training step on a cluster.\n\n"
    "You do not need the cluster: its links are described in a file.",
    {
        "exchange": simulate.exchange,
        "step": simulate.step,
        "local": local,
        "backups": backups,
    },
)
_group(
    "plan",
    "Recommend settings for a job, and say why: algorithm, grid, wire and buckets on a cluster.",
    {
        "exchange": plan.exchange,
        "step": plan.step,
        "backups": plan.backups,
        "collective": collective,
    },
)
_group(
    "draw",
    "Draw a schedule, a training step, or how algorithms scale.",
    {
        "schedule": draw.schedule,
        "step": draw.step,
        "scaling": draw.scaling,
        "recorded": draw.recorded,
        "merged": draw.merged,
    },
)
app.command(rich_help_panel=MACHINE)(probe)
app.command(rich_help_panel=MACHINE)(doctor)


def main(program: typer.Typer = app) -> None:
    """Run `program`; print an error raised on purpose as one line, and exit with its code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
    try:
        program()
    except CommrtError as error:
        print(f"commrt: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ScheduleError | DisagreementError) else 1)


def in_one_line(error: CommrtError) -> str:
    """Return the message shortened and without control characters, which user input may contain."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(error))
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
