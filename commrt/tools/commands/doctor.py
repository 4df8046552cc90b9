# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: which packages are installed, what would fail or be slow, and what to do about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commrt.errors import UsageError
from commrt.store.launcher import default_timeout_s, launched
from commrt.threads.deadline import Timeouts
from commrt.tools.commands.options import Json, json_of
from commrt.tools.measuring.doctor_environment import (
    Finding,
    guarded,
    installed,
    interfaces,
    launcher,
    packages,
    variables,
)

__all__ = ["doctor", "examine"]

COLOURS = {"ok": "green", "absent": "yellow", "warning": "yellow", "problem": "red"}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not start two processes that exchange data.")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, and say what to fix.

    Checks packages, host, GPUs and environment variables. Unless --quick is given, two processes exchange data for
    up to 4 seconds. The exit code is 1 if training would fail.
    """
    findings = [*examine(quick)]
    ok = all(finding.verdict != "problem" for finding in findings)
    if as_json:
        print(json_of({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    if not ok:
        raise typer.Exit(1)


def _show(findings: Sequence[Finding]) -> None:
    table = Table("", "", "", title="commrt doctor", show_header=False)
    table.columns[2].overflow = "fold"
    for finding in findings:
        verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, verdict, escape("\n".join(filter(None, (finding.detail, finding.advice)))))
    Console().print(table)


def examine(quick: bool = False) -> Iterator[Finding]:
    """Yield all findings; with `quick` no processes are started."""
    yield Finding("python", "ok", platform.python_version())
    yield from guarded("launcher", lambda: launcher(os.environ, launched()))
    yield from guarded("timeouts", _timeouts)
    try:
        torch = import_module("torch")
        from commrt.tools.measuring import doctor_machine  # noqa: PLC0415  # imports torch too
    except Exception as error:  # a missing library, or a build for another machine
        yield from guarded("versions", lambda: packages(installed(), None))
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding("torch", "problem", detail, "Reinstall it: pip install --force-reinstall torch.")
    else:
        yield from guarded("versions", lambda: packages(installed(), torch.version.cuda))
        launch = None
        with suppress(UsageError):  # the launcher's finding says it
            launch = launched()
        yield from doctor_machine.examine(launch, quick)
    yield from guarded("variables", lambda: variables(os.environ, interfaces()))


def _timeouts() -> Iterator[Finding]:
    yield Finding("timeouts", "ok", f"{Timeouts.of(default_timeout_s())}, unless init() sets others")
