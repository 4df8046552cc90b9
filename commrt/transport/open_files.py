# SPDX-License-Identifier: Apache-2.0
"""How many files this process may open: sockets and segments of a transport are files.

Changes the limit of the whole process, for good; ranks do so as they start to connect.
"""

from __future__ import annotations

from contextlib import suppress

MOST_FILES = 1 << 20
"""Linux's own limit (``fs.nr_open``). Some programs close all numbers up to their limit."""


def raise_limit() -> None:
    """Let this process open as many files as its hard limit allows, where there are such limits."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415  # not on all systems

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
