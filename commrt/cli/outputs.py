# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: what cannot be written is said before the work, not after it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from commrt.errors import CommrtError, UsageError

__all__ = ["json_of", "require_writable", "write"]


def require_writable(option: str, path: str, such_as: str) -> None:
    """Raise `UsageError` if nothing can be written to `path`, which `option` named."""
    try:
        _require(option, path, such_as)
    except OSError as error:  # a name that is too long, for instance
        raise UsageError(f"{option}: no file can have this name: {error.strerror}") from error


def _require(option: str, path: str, such_as: str) -> None:
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {folder}, make it first")
    if Path(path).is_dir():
        raise UsageError(f"{option} {path} is a folder: give a file, such as {Path(path) / such_as}")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written by this user: give another file")


def json_of(facts: object) -> str:
    """As text; numbers that JSON does not have are null.

    >>> json_of({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(_finite(facts), allow_nan=False)


def _finite(facts: object) -> object:
    match facts:
        case dict():
            return {key: _finite(value) for key, value in facts.items()}
        case list() | tuple():
            return [_finite(value) for value in facts]
        case float() if not isfinite(facts):
            return None
    return facts


def write(option: str, path: str, save: Callable[[], object]) -> None:
    """Call `save`; raises `CommrtError` for what the disk says."""
    try:
        save()
    except OSError as error:
        raise CommrtError(f"{option} {path} could not be written: {error}") from error
