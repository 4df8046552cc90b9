# SPDX-License-Identifier: Apache-2.0
"""What a library says in one of its errors, for ours to quote: a pure function."""

from __future__ import annotations

import re

IN_SOURCE = re.compile(
    r"\[enforce fail at [^\]]*\] [^.]*\. (-?\d+ vs -?\d+\. )?" r"|\[[^\]]*/[^\]]*\] *"
)
"""Where in its own source a library failed, and the condition that did not hold there."""


def cause_of(error: BaseException) -> str:
    """Return what a library says in `error`: the first line, without places in its own source.

    >>> cause_of(RuntimeError("[enforce fail at /a/b.cc:8] -1 vs -1. pipe: Too many open files"))
    'pipe: Too many open files'
    >>> cause_of(RuntimeError("Gloo failed with [/a/b.cc:1] timed out, remote=[127.0.0.1]:30"))
    'Gloo failed with timed out, remote=[127.0.0.1]:30'
    """
    first = next(iter(str(error).splitlines()), "")
    return IN_SOURCE.sub("", first)[:300].strip() or type(error).__name__
