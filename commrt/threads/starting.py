# SPDX-License-Identifier: Apache-2.0
"""Start a daemon thread, or say which limit forbids that; on any thread, and nothing is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commrt.errors import TransportError


def start_thread(work: Callable[..., object], name: str, *args: object) -> threading.Thread:
    """Return a new daemon thread that calls ``work(*args)``.

    Raises `TransportError` if the system allows none.
    """
    thread = threading.Thread(target=work, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"the thread {name} cannot be started ({error}): raise the limit on processes "
            "(`ulimit -u`, or the container's), or on memory (`ulimit -v`)"
        ) from error
    return thread
