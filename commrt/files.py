# SPDX-License-Identifier: Apache-2.0
"""Read a file that a user has named; it may be anything, and is never waited for or written.

On the caller's thread; nothing is kept.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from commrt.errors import UsageError

MAX_NBYTES = 256 << 20
"""A timeline of a million ranges has 200 MB."""


def read_text(file: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file of at most `MAX_NBYTES`; raise `UsageError`, never wait."""
    try:
        return _read(file).decode(encoding).replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file!s:.200} cannot be read: {error}") from error


def _read(file: str | Path) -> bytes:
    with open(file, "rb", opener=_open_at_once) as opened:  # Path.open takes no opener
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError("it is no regular file: copy what it gives to one")
        data = opened.read(MAX_NBYTES + 1)
    if len(data) > MAX_NBYTES:
        raise OSError(f"it is larger than {MAX_NBYTES:,} bytes: give a part of it")
    return data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
