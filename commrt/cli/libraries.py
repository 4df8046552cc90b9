# SPDX-License-Identifier: Apache-2.0
"""The NCCL in this process, for ``commrt doctor``: which, whence, whether there are two, and what names it knows."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from commrt.cli.findings import Finding

__all__ = ["NCCL_AT_LEAST", "known_names", "mapped", "names_in", "nccl"]

NCCL_AT_LEAST = 21800
"""CuPy 14's."""


def nccl() -> Iterator[Finding]:
    """What GPUs would exchange through; loads it."""
    from commrt.transport.binding import load, named  # noqa: PLC0415  # imports torch

    if find_spec("cupy") is None:
        detail = "CuPy, through which it is reached, is not installed"
        yield Finding("nccl", "absent", detail, "Only GPUs need it.")
        return
    binding = load()
    runtime, built, torchs = binding.get_version(), binding.get_build_version(), _of_torch()
    copies = mapped(Path("/proc/self/maps").read_text(encoding="utf-8")) if Path("/proc/self/maps").exists() else []
    facts = {"loaded": named(runtime), "cupy_built_with": named(built), "torch_links": torchs, "files": copies}
    detail = f"{named(runtime)}, CuPy was built with {named(built)}"
    detail += f", torch links {torchs}" if torchs else ", torch has none of its own"
    if runtime < NCCL_AT_LEAST:
        yield Finding("nccl", "problem", detail, "commrt needs 2.18 or later: upgrade nvidia-nccl.", facts)
    elif len(copies) > 1 or torchs not in (None, named(runtime)):
        advice = (
            "Two share no state, and wait for each other in orders of their own: install the one that torch asks for."
        )
        yield Finding("nccl", "warning", f"{detail}; two are in this process: {', '.join(copies)}", advice, facts)
    else:
        yield Finding("nccl", "ok", detail, facts=facts)


def _of_torch() -> str | None:
    """The NCCL that torch calls; None if it was built without."""
    import torch  # noqa: PLC0415

    with suppress(AttributeError, RuntimeError, ImportError):
        if torch.cuda.is_available() or torch.version.cuda is not None:
            from torch.cuda import nccl  # noqa: PLC0415

            return ".".join(str(part) for part in nccl.version()[:3])  # type: ignore[no-untyped-call]
    return None


def mapped(maps: str) -> list[str]:
    r"""The files of NCCL in a ``/proc/self/maps``.

    >>> mapped("7f0-7f1 r-xp 00000000 08:01 9  /a/libnccl.so.2\n7f1-7f2 r--p 00000000 08:01 9  /a/libnccl.so.2\n")
    ['/a/libnccl.so.2']
    """
    return sorted(set(re.findall(r"\s(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)))


def names_in(library: str) -> frozenset[str]:
    """The variables ``NCCL_...`` that stand in a library, which is to say those that it can read."""
    with Path(library).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return frozenset(name.decode() for name in re.findall(rb"NCCL_[A-Z0-9_]+(?=\x00)", content))


def known_names() -> frozenset[str]:
    """`names_in` the NCCL that this process has loaded, if it has."""
    maps = Path("/proc/self/maps")
    files = mapped(maps.read_text(encoding="utf-8")) if maps.exists() else []
    return names_in(files[0]) if files else frozenset()
