# SPDX-License-Identifier: Apache-2.0
"""The command ``commrt``, and the options of what looks at a machine. Code is imported when it is called."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import commrt
from commrt.errors import CommrtError, DisagreementError, ScheduleError, UsageError
from commrt.tools.commands import options as opt
from commrt.tools.commands import price_commands as commands

__all__ = ["app", "in_one_line", "main"]

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

PRICE, MACHINE = "Prove, price and draw", "Look at a machine"
MAX_CHARACTERS = 1500
"""Of an error message."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"commrt {commrt.__version__}")
        raise typer.Exit


@app.callback()
def commrt_(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Data-parallel training with collectives that are proven before they run.

    Exit codes: 0 success, 1 runtime failure, 2 invalid input, 130 interrupted.
    """


app.command(rich_help_panel=PRICE)(commands.verify)
app.add_typer(commands.simulate, name="simulate", rich_help_panel=PRICE)
app.add_typer(commands.plan, name="plan", rich_help_panel=PRICE)
app.add_typer(commands.draw, name="draw", rich_help_panel=PRICE)


@app.command(rich_help_panel=MACHINE)
def probe(
    out: Annotated[str, typer.Option(metavar="FILE", help="The file to write: a cluster description, .toml.")],
    workers: Annotated[int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="How long a rank waits for another one, in seconds.")] = 60.0,
) -> None:
    """Measure the links between ranks, for simulate and plan.

    On this machine, or in the job that starts it.
    """
    from commrt.tools.commands import probe as command  # noqa: PLC0415  # commands are imported when called

    command.run(out, workers, timeout_s)


@app.command(rich_help_panel=MACHINE)
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start two processes that exchange data.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Check this machine, and say what to fix.

    Checks packages, host, GPUs and environment variables. Unless --quick is given, two processes exchange data for
    up to 4 seconds. The exit code is 1 if training would fail.
    """
    from commrt.tools.commands import doctor as command  # noqa: PLC0415  # commands are imported when called

    if not command.run(as_json, quick):
        raise typer.Exit(1)


def main(program: typer.Typer = app) -> None:
    """Run `program`; print an error that commrt raised on purpose as one line, and exit with its code."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be any bytes
    try:
        program()
    except CommrtError as error:
        print(f"commrt: {in_one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ScheduleError | DisagreementError) else 1)


def in_one_line(error: CommrtError) -> str:
    """Return the message without control characters, which user input may contain, and shortened."""
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(error))
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
