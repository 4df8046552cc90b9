# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: what cannot be written is said before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from commrt.errors import CommrtError, UsageError

__all__ = ["require_writable", "write"]


def require_writable(option: str, path: str, such_as: str) -> None:
    """Raise `UsageError` if nothing can be written to `path`, which `option` named."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {folder}, make it first")
    if Path(path).is_dir():
        raise UsageError(f"{option} {path} is a folder: give a file, such as {Path(path) / such_as}")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written by this user: give another file")


def write(option: str, path: str, save: Callable[[], object]) -> None:
    """Call `save`; raises `CommrtError` for what the disk says."""
    try:
        save()
    except OSError as error:
        raise CommrtError(f"{option} {path} could not be written: {error}") from error
