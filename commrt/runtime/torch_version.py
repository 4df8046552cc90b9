# SPDX-License-Identifier: Apache-2.0
"""Versions of torch that commrt was tested with (``dev/versions.py``), and what others are told.

On any thread; keeps only which versions were logged.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from packaging.version import Version

from commrt.errors import UsageError

OLDEST = Version("2.9")
NEWEST = Version("2.15")
"""All from the first to the second are known to work, with their patches.

``pyproject.toml`` names the first.
"""

_log = logging.getLogger("commrt")


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise `UsageError` for a torch that is too old; log one that is newer than all tested."""
    if (minor := Version(".".join(map(str, Version(version).release[:2])))) < OLDEST:
        raise UsageError(
            f"torch {version} is too old for commrt: install torch {OLDEST} or later, on every host"
        )
    if minor > NEWEST:
        _log_once(version)


@cache
def _log_once(version: str) -> None:
    _log.warning(
        "commrt: torch %s is newer than the versions that commrt was tested with, %s to %s. If"
        " something fails that works with these, install one of them, and report it",
        version,
        OLDEST,
        NEWEST,
    )
