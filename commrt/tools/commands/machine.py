# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor`` and ``commrt probe``: look at this machine, and measure a world's links.

Both may start processes, and only `probe` writes a file. The work is in `tools/measuring`, whose
modules with torch are imported when a command is called; here are the order of checks and the text.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import commrt
from commrt.errors import UsageError
from commrt.pricing.cluster import Cluster
from commrt.store.environment import default_timeout_s
from commrt.store.launcher import launched
from commrt.threads.deadline import Timeouts, require_deadlines
from commrt.tools.commands.arguments import Json
from commrt.tools.commands.output import json_of
from commrt.tools.measuring import doctor_environment as checks
from commrt.tools.measuring.findings import Finding, guarded
from commrt.tools.pictures.files import require_writable, write

COLOURS = {"ok": "green", "absent": "yellow", "warning": "yellow", "problem": "red"}


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not start two processes that exchange data.")
    ] = False,
    as_json: Json = False,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Show a running job instead: MASTER_ADDR:MASTER_PORT, started with COMMRT_LIVE=1.",
        ),
    ] = None,
) -> None:
    """Check this machine, and say what to fix.

    Checks packages, host, GPUs and environment variables. Unless --quick is given, two processes
    exchange data for up to 4 seconds. The exit code is 1 if training would fail.
    """
    if watch is not None:
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # a job that ends takes its store along
        from commrt.tools.commands.watch import watch as show_job  # noqa: PLC0415  # imports torch

        show_job(watch, as_json=as_json)
        return
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
        table.add_row(
            finding.name, verdict, escape("\n".join(filter(None, (finding.detail, finding.advice))))
        )
    Console().print(table)


def examine(quick: bool = False) -> Iterator[Finding]:
    """Yield all findings; with `quick` no processes are started."""
    yield Finding("python", "ok", platform.python_version())
    yield from guarded("launcher", lambda: checks.launcher(os.environ, launched()))
    yield from guarded("timeouts", _timeouts)
    try:
        torch = import_module("torch")
        from commrt.tools.measuring import doctor_machine  # noqa: PLC0415  # imports torch too
    except Exception as error:  # a missing library, or a build for another machine
        yield from guarded("versions", lambda: checks.packages(checks.installed(), None))
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding(
            "torch", "problem", detail, "Reinstall it: pip install --force-reinstall torch."
        )
    else:
        yield from guarded(
            "versions", lambda: checks.packages(checks.installed(), torch.version.cuda)
        )
        launch = None
        with suppress(UsageError):  # the launcher's finding says it
            launch = launched()
        yield from doctor_machine.examine(launch, quick)
    yield from guarded("variables", lambda: checks.variables(os.environ, checks.interfaces()))


def _timeouts() -> Iterator[Finding]:
    yield Finding(
        "timeouts", "ok", f"{Timeouts.of(default_timeout_s())}, unless init() sets others"
    )


def probe(
    out: Annotated[
        str, typer.Option(metavar="FILE", help="The file to write: a cluster description, .toml.")
    ],
    workers: Annotated[
        int, typer.Option(min=2, max=64, help="Local processes; ignored under a launcher.")
    ] = 4,
    timeout_s: Annotated[
        float, typer.Option(help="How long a rank waits for another one, in seconds.")
    ] = 60.0,
) -> None:
    """Measure the links between ranks, for simulate and plan.

    On this machine, or in the job that starts it.
    """
    from commrt.tools.measuring.probing import probed  # noqa: PLC0415  # imports torch

    require_writable("--out", out, "mine.toml", [".toml"])
    require_deadlines(**{"--timeout-s": timeout_s})
    launch = launched()
    path = Path(out)
    cluster = probed(launch, workers, timeout_s)
    if launch is None or launch.rank == 0:  # one writes it
        text = replace(cluster, name=path.stem, about=f"{cluster.about} {_circumstances()}").text()
        write("--out", out, lambda: path.write_text(text, encoding="utf-8"))
        print(_sentence(cluster, out))


def _circumstances() -> str:
    """Return when, where and with which versions this was measured."""
    day = datetime.now(UTC).date()
    versions = f"commrt {commrt.__version__} and torch {version('torch')}"
    return f"On {day} (UTC), from {platform.node()}, with {versions}."


def _sentence(cluster: Cluster, out: str) -> str:
    within = cluster.within
    between = cluster.between
    links = []
    if cluster.gpus_per_node > 1:
        links.append(f"{within.latency_us:.0f} us and {within.gbytes_per_s:.3g} GB/s inside a host")
    if cluster.nodes != 1:
        rate = f"{between.nics} x {between.gbytes_per_s:.3g} GB/s"
        links.append(f"{between.latency_us:.0f} us and {rate} between hosts")
    return f"{out}: {', '.join(links)}"
