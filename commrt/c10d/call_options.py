# SPDX-License-Identifier: Apache-2.0
"""What a caller's options object says, and its timeout, in torch's terms: pure functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from commrt.errors import UsageError
from commrt.threads.deadline import LONGEST_TIMEOUT_S

NO_TIMEOUT = timedelta(0)
"""What torch passes where the caller gives none."""


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's own."""
    return None if timeout is None or timeout <= NO_TIMEOUT else kept_seconds_of(timeout)


def kept_seconds_of(timeout: timedelta) -> float:
    """Return a timeout of torch in seconds, or the longest, 23 days, for those that mean for ever.

    >>> kept_seconds_of(timedelta(minutes=5)), kept_seconds_of(timedelta(days=10_000))
    (300.0, 2000000.0)
    """
    return min(timeout.total_seconds(), LONGEST_TIMEOUT_S)


def option(opts: Any, name: str, default: Any) -> Any:
    """Return the option `name` of `opts`, `default` if they are None; raise for other objects."""
    if opts is None:
        return default
    try:
        return getattr(opts, name)
    except AttributeError:
        raise UsageError(
            f"{opts!r} has no {name}: pass an options object, such as"
            f" torch.distributed.ReduceOptions(), and set the {name} of that"
        ) from None
