# SPDX-License-Identifier: Apache-2.0
"""Checks of what users give to algorithms: a root, a whole number, an object that makes schedules.

They raise, and change nothing. Ways to train in other rooms check their arguments by them too.
"""

from __future__ import annotations

from commrt.errors import UsageError


def require_root(p: int, root: int, what: str) -> None:
    """Raise `UsageError` unless `root` is one of `p` ranks."""
    if not 0 <= root < p:
        raise UsageError(
            f"rank {root} cannot be the root of a {what} over {p} ranks: choose one of 0..{p - 1}"
        )


def require_whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise `UsageError` unless `value` is a whole number in range."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limit = "on" if most is None else f"to {most:,}"
        raise UsageError(f"{name}={value!r:.80}: give a whole number from {least} {limit}")


def require_maker(name: str, value: object) -> None:
    """Raise `UsageError` unless `value` is an object that makes schedules."""
    if isinstance(value, type) or not callable(getattr(value, "schedule", None)):
        raise UsageError(
            f"{name}={value!r:.80} makes no schedules: pass an object, such as commrt.Ring()"
        )
