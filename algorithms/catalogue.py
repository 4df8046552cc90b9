# SPDX-License-Identifier: Apache-2.0
"""The algorithms by the names used on the command line."""

from __future__ import annotations

from collections.abc import Callable

from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.ring import Ring
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.schedule import Algorithm

__all__ = ["ALGORITHMS", "by_name"]

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "ring": Ring,
    "halving_doubling": HalvingDoubling,
    "torus2d": Torus2D,
}
"""Name to constructor; each works without arguments."""


def by_name(name: str) -> Algorithm:
    """The algorithm called `name`, with its defaults; raises `UsageError` that lists the names.

    >>> by_name("torus2d")
    Torus2D(grid=None, both_ways=False)
    """
    if name not in ALGORITHMS:
        raise UsageError(f"no algorithm is called {name!r}: choose one of {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]()
