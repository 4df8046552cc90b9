# SPDX-License-Identifier: Apache-2.0
"""Kernels with a bug in them, in place of those that are launched."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp

import pytest

from commrt.kernels.device import variants

__all__ = ["plant"]


def plant(bug: tuple[str, str, str], kernels: Iterable[str], within: Path, patch: pytest.MonkeyPatch) -> None:
    """Import the modules of `kernels` with `bug`, (module, text, what stands there instead), to launch them."""
    module, before, after = bug
    package = Path(mkdtemp(prefix="planted_", dir=within))
    for path in Path(variants.__file__).parent.glob("*.py"):
        source = path.read_text().replace("commrt.kernels.device", package.name)
        if path.stem == module:
            assert source.count(before) == 1
            source = source.replace(before, after)
        (package / path.name).write_text(source)
    patch.syspath_prepend(within)
    for name in kernels:
        broken = importlib.import_module(f"{package.name}.{name}")
        for kernel in (each for each in vars(broken) if each.endswith("_kernel")):
            patch.setattr(variants, kernel, getattr(broken, kernel))
