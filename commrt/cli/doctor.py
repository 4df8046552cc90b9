# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: what is installed, what would break or hurt, what to do about it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commrt.cli.findings import Finding, guarded
from commrt.cli.outputs import json_of
from commrt.errors import UsageError
from commrt.membership.launcher import Launch, launched

__all__ = ["examine", "run"]

COLOURS = {"ok": "green", "absent": "yellow", "warning": "yellow", "problem": "red"}


def run(as_json: bool, quick: bool = False) -> bool:
    """Print all findings; True if none is a problem. With `quick` no processes are started to exchange something."""
    findings = [*examine(quick)]
    ok = all(finding.verdict != "problem" for finding in findings)
    if as_json:
        print(json_of({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
        return ok
    table = Table("", "", "", title="commrt doctor", show_header=False)
    table.columns[2].overflow = "fold"
    for finding in findings:
        verdict = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, verdict, escape("\n".join(filter(None, (finding.detail, finding.advice)))))
    Console().print(table)
    return ok


def examine(quick: bool = False) -> Iterator[Finding]:
    """Look at everything. Processes are forked before a driver or NCCL is loaded, which would not survive that."""
    yield Finding("python", "ok", platform.python_version())
    yield from guarded("versions", _versions)
    for name, check in (("launcher", _launcher), ("deadline", _deadline)):
        yield from guarded(name, check)
    if broken := _why_not_torch():
        yield broken
        yield from guarded("variables", _variables)
        return
    yield from guarded("transport", _transport)
    yield from guarded("host", _host)
    if not quick:
        yield from guarded("exchange", _exchange)
    yield from guarded("gpu", _gpus)
    yield from guarded("nccl", _nccl)
    yield from guarded("variables", _variables)


def _versions() -> Iterator[Finding]:
    from commrt.cli import fitting  # noqa: PLC0415  # checks are imported when made

    found = fitting.installed()
    yield from fitting.packages(found)
    yield from guarded("versions", partial(fitting.fits, found))


def _why_not_torch() -> Finding | None:
    """Without it nothing else can be looked at."""
    try:
        import_module("torch")
    except Exception as error:  # a library that it needs, or one for another machine
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        return Finding("torch", "problem", detail, "Install it anew: pip install --force-reinstall torch.")
    return None


def _launcher() -> Iterator[Finding]:
    launch = launched()
    if launch is None:
        yield Finding("launcher", "ok", "none: commrt.init() makes a world of one process")
        return
    where = f"rank {launch.rank} of {launch.size}, store at {launch.address}:{launch.port}"
    yield Finding("launcher", "ok", f"{launch.launcher}: {where}")


def _deadline() -> Iterator[Finding]:
    from commrt.membership.launcher import default_timeout_s  # noqa: PLC0415

    yield Finding("deadline", "ok", f"{default_timeout_s():g} s for every wait, unless init() says otherwise")


def _transport() -> Iterator[Finding]:
    from commrt.membership.launcher import chosen_transport  # noqa: PLC0415
    from commrt.transport.meeting import host_identity  # noqa: PLC0415

    asked, can_share = chosen_transport(), host_identity() is not None
    if asked == "shared" and not can_share:
        detail = "COMMRT_TRANSPORT=shared, and this platform lacks memfd_create or abstract sockets"
        yield Finding("transport", "problem", detail, "Unset it.")
        return
    here = "shared memory" if can_share else "Gloo"
    detail = f"COMMRT_TRANSPORT={asked}" if asked else f"ranks on this host: {here}; on several hosts: Gloo"
    yield Finding("transport", "ok", detail)


def _host() -> Iterator[Finding]:
    import torch  # noqa: PLC0415

    from commrt.cli import host  # noqa: PLC0415

    launch = _launch()
    yield from guarded("shared memory", host.shared_memory)
    yield from guarded("open files", partial(host.files, launch))
    yield from guarded("processors", partial(host.processors, launch, torch.get_num_threads()))
    yield from guarded("clock", host.clock)


def _launch() -> Launch | None:
    """None also where it contradicts itself, which is a finding of its own."""
    with suppress(UsageError):
        return launched()
    return None


def _exchange() -> Iterator[Finding]:
    import torch  # noqa: PLC0415

    from commrt.cli.exchange import exchange  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more cannot be handed on to forked processes
    try:
        yield from exchange()
    finally:
        torch.set_num_threads(before)


def _gpus() -> Iterator[Finding]:
    import torch  # noqa: PLC0415

    from commrt.cli.devices import gpus  # noqa: PLC0415

    yield from gpus(torch.cuda, torch.version.cuda)


def _nccl() -> Iterator[Finding]:
    from commrt.cli.libraries import nccl  # noqa: PLC0415

    yield from nccl()


def _variables() -> Iterator[Finding]:
    from commrt.cli.host import cpus  # noqa: PLC0415
    from commrt.cli.libraries import known_names  # noqa: PLC0415
    from commrt.cli.variables import Surroundings, harmful, interfaces  # noqa: PLC0415

    around = Surroundings(interfaces(), cpus(), _launch() is not None, known_names)
    yield from harmful(os.environ, around)
