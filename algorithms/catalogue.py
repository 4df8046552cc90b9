# SPDX-License-Identifier: Apache-2.0
"""The algorithms by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable

from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.ring import Ring
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.schedule import Algorithm

__all__ = ["ALGORITHMS", "BACKUP", "GOSSIP", "by_name"]

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "ring": Ring,
    "halving_doubling": HalvingDoubling,
    "torus2d": Torus2D,
}
"""Constructors of the all-reduces by name; each works without arguments."""

GOSSIP, BACKUP = "gossip", "backup"


def by_name(name: str) -> Algorithm:
    """Return the algorithm called `name` with its defaults; raises `UsageError` that lists the names.

    >>> by_name("torus2d")
    Torus2D(grid=None, both_ways=False)
    """
    offered = {**ALGORITHMS, GOSSIP: Gossip, BACKUP: BackupWorkers}
    if name not in offered:
        raise UsageError(f"no algorithm is called {name!r}: choose one of {', '.join(sorted(offered))}")
    return offered[name]()
