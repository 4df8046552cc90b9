# SPDX-License-Identifier: Apache-2.0
"""Algorithms and schedules by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from commrt.algorithms import bruck, chain, direct, double_tree, halving_doubling, ring, tree
from commrt.algorithms.backup import BackupWorkers
from commrt.algorithms.direct import Direct
from commrt.algorithms.double_tree import DoubleTree
from commrt.algorithms.gossip import Gossip
from commrt.algorithms.halving_doubling import HalvingDoubling
from commrt.algorithms.local import LocalSGD
from commrt.algorithms.parts import require_root
from commrt.algorithms.ring import Ring, Rings
from commrt.algorithms.torus import Torus2D
from commrt.errors import UsageError
from commrt.schedule import Algorithm, Schedule

GOSSIP, BACKUP, DIRECT, LOCAL = "gossip", "backup", "direct", "local"

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "ring": Ring,
    "rings": Rings,
    "halving_doubling": HalvingDoubling,
    "double_tree": DoubleTree,
    "torus2d": Torus2D,
    DIRECT: Direct,
}
"""Constructors of the all-reduces by name; each works without arguments."""


def by_name(name: str) -> Algorithm:
    """Return the algorithm called `name` with its defaults; raises `UsageError` that lists the names.

    >>> by_name("torus2d")
    Torus2D(grid=None, both_ways=False)
    """
    offered = {**ALGORITHMS, GOSSIP: Gossip, BACKUP: BackupWorkers, LOCAL: LocalSGD}
    if name not in offered:
        raise UsageError(f"no algorithm is called {name!r}: choose one of {', '.join(sorted(offered))}")
    return offered[name]()


def _any_root(build: Callable[[int], Schedule]) -> Callable[[int, int], Schedule]:
    return lambda ranks, _: build(ranks)


COLLECTIVES: Mapping[str, Mapping[str, Callable[[int, int], Schedule]]] = {
    "broadcast": {
        "tree": tree.broadcast,
        "direct": direct.broadcast,
        "chain": chain.broadcast,
        "scatter_gather": tree.broadcast_in_parts,
    },
    "reduce": {
        "tree": tree.reduce,
        "direct": direct.reduce,
        "chain": chain.reduce,
        "scatter_gather": tree.reduce_in_parts,
    },
    "gather": {"tree": tree.gather, "direct": direct.gather},
    "scatter": {"tree": tree.scatter, "direct": direct.scatter},
    "all_gather": {
        "ring": _any_root(ring.all_gather),
        "doubling": _any_root(halving_doubling.all_gather),
        "bruck": _any_root(bruck.all_gather),
        "direct": _any_root(direct.all_gather),
    },
    "reduce_scatter": {
        "ring": _any_root(ring.reduce_scatter),
        "halving": _any_root(halving_doubling.reduce_scatter),
        "bruck": _any_root(bruck.reduce_scatter),
        "direct": _any_root(direct.reduce_scatter),
    },
    "all_reduce": {
        "ring": _any_root(ring.all_reduce),
        "halving_doubling": _any_root(halving_doubling.all_reduce),
        "torus2d": _any_root(lambda ranks: Torus2D().schedule(0, ranks)),
        "doubling": _any_root(halving_doubling.doubling),
        "double_tree": _any_root(double_tree.all_reduce),
        "direct": _any_root(direct.all_reduce),
    },
    "all_to_all": {"pairwise": _any_root(direct.pairwise_all_to_all), "direct": _any_root(direct.all_to_all)},
    "barrier": {"dissemination": _any_root(bruck.barrier)},
}
"""For each collective its schedules by name, as functions of (ranks, root)."""

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Collectives that have a root. The others ignore it."""


def candidates(collective: str, ranks: int, root: int = 0) -> dict[str, Schedule]:
    """Return the schedules of `collective` that take `ranks` ranks, by name; equal arguments give the same objects.

    Raises `UsageError` for an unknown collective, listing all, and for a root outside the ranks.

    >>> list(candidates("all_gather", 4)), list(candidates("all_gather", 6))
    (['ring', 'doubling', 'bruck', 'direct'], ['ring', 'bruck', 'direct'])
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"no collective is called {collective!r}: choose one of {', '.join(sorted(COLLECTIVES))}")
    require_root(ranks, root, collective)
    found = {}
    for name, build in COLLECTIVES[collective].items():
        with suppress(UsageError):  # it takes other rank counts only
            found[name] = build(ranks, root)
    return found
